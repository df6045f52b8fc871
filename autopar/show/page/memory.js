// What the devices of a lane hold over the step, by kind, under the limit; its time axis is that of the timeline.

const MEMORY_HEIGHT = 220;

class MemoryView extends OverTime {
  constructor(plan, number, state, actions) {
    const lane = plan.timeline.lanes[number];
    super(plan, state, actions);
    this.lane = lane;
    let now = 0;
    this.times = lane.memory.times.map((more) => (now += more));
    this.kinds = Object.keys(lane.memory.kinds).sort(
      (a, b) => Math.max(...lane.memory.kinds[b]) - Math.max(...lane.memory.kinds[a]),
    );
    this.totals = this.times.map((_, at) => this.kinds.reduce((sum, kind) => sum + lane.memory.kinds[kind][at], 0));
    this.mount(MEMORY_HEIGHT, {
      class: 'memory',
      role: 'img',
      'aria-label': `memory of ${laneName(plan, lane)} over the step, at most ${bytes(lane.peak_bytes)}`,
    });
  }

  paint(context) {
    const isSmall = this.lane.peak_bytes * 5 < this.plan.memory_limit;
    const most = Math.max(
      isSmall ? 1.25 * this.lane.peak_bytes : 1.06 * Math.max(this.plan.memory_limit, this.lane.peak_bytes),
      1,
    );
    const y = (size) => MEMORY_HEIGHT - ((MEMORY_HEIGHT - RULER) * size) / most;
    this.clipped(context, 0, () => this.drawKinds(context, y));
    this.drawScale(context, y, most);
  }

  drawKinds(context, y) {
    const below = new Float64Array(this.times.length);
    const step = this.plan.timeline.step_time_ns;
    const first = Math.max(0, above(this.times, this.range[0]) - 1);
    for (const kind of this.kinds) {
      context.fillStyle = colour(memoryColour(kind));
      const sizes = this.lane.memory.kinds[kind];
      context.beginPath();
      const edge = [];
      for (let at = first; at < this.times.length && this.times[at] <= this.range[1]; at += 1) {
        const [left, right] = [this.x(this.times[at]), this.x(at + 1 < this.times.length ? this.times[at + 1] : step)];
        context.lineTo(left, y(below[at]));
        context.lineTo(right, y(below[at]));
        below[at] += sizes[at];
        edge.push([right, y(below[at])], [left, y(below[at])]);
      }
      for (let at = 0; at < edge.length; at += 2) {
        const pair = edge.length - 2 - at;
        context.lineTo(...edge[pair]);
        context.lineTo(...edge[pair + 1]);
      }
      context.fill();
    }
  }

  drawScale(context, y, most) {
    context.textAlign = 'right';
    context.fillStyle = colour('faint');
    for (const size of [0, most / 4, most / 2, (3 * most) / 4])
      context.fillText(bytes(size), GUTTER - 6, Math.min(y(size), MEMORY_HEIGHT - 7));
    if (!this.plan.memory_limit || this.plan.memory_limit > most) return;
    context.fillStyle = colour('bad');
    context.fillRect(GUTTER, y(this.plan.memory_limit), this.width - GUTTER, 1.5);
    context.textAlign = 'left';
    context.fillText(`limit ${bytes(this.plan.memory_limit)}`, GUTTER + 4, y(this.plan.memory_limit) - 7);
  }

  point(event) {
    const [x] = this.place(event);
    const at = above(this.times, this.ns(x)) - 1;
    this.tip.hidden = x < GUTTER || at < 0;
    if (this.tip.hidden) return;
    const rows = this.kinds
      .filter((kind) => this.lane.memory.kinds[kind][at])
      .map((kind) => el('div', {}, swatch(memoryColour(kind)), ` ${kind} ${bytes(this.lane.memory.kinds[kind][at])}`));
    this.showTip(
      x,
      24,
      el('b', {}, `${grouped(this.totals[at])} B (${bytes(this.totals[at])})`),
      el('div', { class: 'note' }, `at ${grouped(this.times[at])} ns, the fullest moment about here`),
      ...rows,
    );
  }
}

function memory(plan, state, actions) {
  if (!plan.timeline) {
    return el(
      'div',
      {},
      memoryBar(plan, plan.predicted.memory, plan.predicted.peak_bytes),
      howToGetATimeline(plan, 'memory over time'),
    );
  }
  const number = chosenLane(plan, state, (lane) => lane.peak_bytes);
  const view = new MemoryView(plan, number, state, actions);
  actions.views.push(view);
  const lane = plan.timeline.lanes[number];
  return el(
    'div',
    {},
    laneButtons(plan, number, actions),
    view.element,
    el('p', { class: 'note' }, `At its peak ${laneName(plan, lane)} holds ${grouped(lane.peak_bytes)} B:`),
    memoryBar(plan, lane.memory_at_peak, lane.peak_bytes),
    el('p', { class: 'note' }, `Drawn is the fullest moment of every ${time(plan.timeline.sample_ns)}.`),
  );
}
