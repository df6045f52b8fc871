// The simulated step: a lane for each group of devices with equal work, a row for each of its streams.
//
// A step repeats its passes, so the data says each distinct pass once. What is drawn depends on the zoom: tasks of at
// least a pixel as boxes; where a pixel holds several, colours share its height by their time. Figures under the
// pointer are always those of the task itself.

const ROW = { compute: 20, other: 10 };
const GAP = 10;
const MIN_WINDOW_NS = 200;

class Timeline extends OverTime {
  constructor(plan, state, actions) {
    super(plan, state, actions);
    this.picture = plan.timeline;
    this.lanes = plan.decoded || (plan.decoded = decoded(plan.timeline));
    this.rows = [];
    let bottom = RULER;
    this.lanes.forEach((streams, lane) => {
      const top = bottom;
      streams.forEach((stream) => {
        const height = stream.name === 'compute' ? ROW.compute : ROW.other;
        this.rows.push({ lane, stream, y: bottom, height, top, first: bottom === top });
        bottom += height + 1;
      });
      bottom += GAP;
    });
    this.mount(bottom, {
      class: 'timeline',
      tabindex: 0,
      role: 'application',
      'aria-label': `timeline of ${plan.model}: plus and minus zoom, arrows move, 0 shows the whole step`,
      onwheel: (event) => this.wheel(event),
      onpointerdown: (event) => this.grab(event),
      onpointerup: () => {
        this.grabbed = null;
      },
      ondblclick: (event) => this.zoomToPass(event),
      onkeydown: (event) => this.key(event),
    });
  }

  paint(context) {
    this.clipped(context, RULER, () => this.rows.forEach((row) => this.drawRow(context, row)));
    this.rows.forEach((row) => this.drawLabel(context, row));
  }

  drawLabel(context, row) {
    context.fillStyle = colour(row.first ? 'ink' : 'faint');
    context.textAlign = 'left';
    const text = row.first ? laneName(this.plan, this.picture.lanes[row.lane]) : row.stream.name.replaceAll('_', ' ');
    context.fillText(text, row.first ? 4 : 14, row.y + row.height / 2, GUTTER - 18);
  }

  drawRow(context, row) {
    context.fillStyle = colour('ground');
    context.fillRect(GUTTER, row.y, this.width - GUTTER, row.height);
    const numKinds = this.picture.kinds.length;
    const columns = new Float64Array((this.width - GUTTER + 2) * numKinds);
    const length = this.range[1] - this.range[0];
    let isShared = false;
    const boxes = [];
    for (const { begin, label, tasks } of this.visible(row.stream)) {
      const pixels = (tasks.latest - tasks.starts[0]) / this.nsPerPixel;
      if (tasks.starts.length > 2 * pixels) {
        const { width, first, bins } = binned(tasks, this.nsPerPixel, numKinds);
        for (let bin = 0; bin < bins.length / numKinds; bin += 1) {
          const start = begin + (first + bin) * width - this.range[0];
          if (start + width <= 0 || start > length) continue;
          for (let kind = 0; kind < numKinds; kind += 1) {
            const share = bins[bin * numKinds + kind] / width;
            if (share)
              spread(Math.max(0, start), Math.min(length, start + width), this.nsPerPixel, (column, ns) => {
                columns[column * numKinds + kind] += share * ns;
              });
          }
        }
        isShared = true;
      } else {
        for (
          let number = Math.max(0, above(tasks.ends, this.range[0] - begin));
          number < tasks.starts.length;
          number += 1
        ) {
          const [start, end] = [begin + tasks.starts[number], begin + tasks.ends[number]];
          if (start > this.range[1]) break;
          const wide = (end - start) / this.nsPerPixel;
          if (wide >= 1) boxes.push([start, end, tasks.kinds[number], tasks.names[number], label]);
          else {
            spread(
              Math.max(0, start - this.range[0]),
              Math.min(length, end - this.range[0]),
              this.nsPerPixel,
              (column, ns) => {
                columns[column * numKinds + tasks.kinds[number]] += ns;
              },
            );
            isShared = true;
          }
        }
      }
    }
    if (isShared) this.drawColumns(context, row, columns, numKinds);
    boxes.forEach((box) => this.drawBox(context, row, ...box));
  }

  // Passes on a stream that may reach into the window.
  *visible(stream) {
    const { placed } = stream;
    for (
      let at = above(placed, this.range[0] - stream.longest, (one) => one.begin);
      at < placed.length && placed[at].begin <= this.range[1];
      at += 1
    ) {
      const one = placed[at];
      if (one.begin + one.tasks.latest > this.range[0] && one.begin + one.tasks.starts[0] < this.range[1]) yield one;
    }
  }

  drawColumns(context, row, columns, numKinds) {
    for (let column = 0; column * numKinds < columns.length - numKinds; column += 1) {
      let bottom = row.y + row.height;
      for (let kind = 0; kind < numKinds; kind += 1) {
        const share = Math.min(1, columns[column * numKinds + kind] / this.nsPerPixel);
        if (share < 0.01) continue;
        context.fillStyle = colour(kindColour(this.picture.kinds[kind]));
        context.fillRect(GUTTER + column, bottom - share * row.height, 1, share * row.height);
        bottom -= share * row.height;
      }
    }
  }

  drawBox(context, row, start, end, kind, name, label) {
    const left = Math.max(GUTTER - 2, this.x(start));
    const wide = Math.min(this.width + 2, this.x(end)) - left;
    const shade = kindColour(this.picture.kinds[kind]);
    context.fillStyle = colour(shade);
    context.fillRect(left, row.y, wide > 3 ? wide - 1 : wide, row.height);
    if (wide > 48 && row.height >= ROW.compute) {
      context.fillStyle = colour(`on-${shade}`);
      context.save();
      context.beginPath();
      context.rect(left, row.y, wide - 3, row.height);
      context.clip();
      context.textAlign = 'left';
      context.fillText(
        `${this.picture.names[name]} ${this.picture.labels[label]}`,
        left + 4,
        row.y + row.height / 2 + 0.5,
      );
      context.restore();
    }
  }

  // What is under a point: the row, the task if there is one within a few pixels, and the pass that it is of.
  found(x, y) {
    const row = this.rows.find((one) => y >= one.y && y < one.y + one.height + 1);
    if (!row || x < GUTTER) return null;
    const at = this.ns(x);
    let best = null;
    for (const { begin, label, tasks } of this.visible(row.stream)) {
      if (begin + tasks.starts[0] > at + 3 * this.nsPerPixel || begin + tasks.latest < at - 3 * this.nsPerPixel)
        continue;
      const next = above(tasks.starts, at - begin);
      for (const number of [next - 1, next]) {
        if (number < 0 || number >= tasks.starts.length) continue;
        const away = Math.max(begin + tasks.starts[number] - at, at - begin - tasks.ends[number], 0);
        if (away <= 3 * this.nsPerPixel && (!best || away < best.away)) best = { away, begin, label, tasks, number };
      }
    }
    return { row, at, ...best };
  }

  point(event) {
    const [x, y] = this.place(event);
    if (this.grabbed) {
      const moved = ((this.grabbed.x - x) * (this.grabbed.range[1] - this.grabbed.range[0])) / (this.width - GUTTER);
      this.actions.range([this.grabbed.range[0] + moved, this.grabbed.range[1] + moved]);
      return;
    }
    const found = this.found(x, y);
    this.tip.hidden = !found;
    if (!found) return;
    this.showTip(x, Math.min(y + 16, this.height), ...this.tipText(found));
  }

  tipText({ row, at, tasks, number, begin, label }) {
    const lane = this.picture.lanes[row.lane];
    const where = [laneName(this.plan, lane), ranksText(lane.ranks), row.stream.name.replaceAll('_', ' ')].join(', ');
    if (!tasks)
      return [el('b', {}, 'idle'), el('div', {}, `at ${grouped(at)} ns`), el('div', { class: 'note' }, where)];
    const [start, end] = [tasks.starts[number], tasks.ends[number]];
    const micro = this.picture.labels[label];
    return [
      el('b', {}, this.picture.names[tasks.names[number]] || 'launch'),
      el(
        'div',
        {},
        swatch(kindColour(this.picture.kinds[tasks.kinds[number]])),
        ` ${this.picture.kinds[tasks.kinds[number]].replaceAll('_', '-')}${micro ? `, microbatch ${micro}` : ''}`,
      ),
      el('div', {}, `${grouped(end - start)} ns (${time(end - start)})`),
      el('div', { class: 'note' }, `from ${grouped(begin + start)} to ${grouped(begin + end)} ns`),
      el('div', { class: 'note' }, where),
    ];
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    const [x] = this.place(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / (this.width - GUTTER));
    else this.zoom(1.0025 ** event.deltaY, this.ns(Math.max(GUTTER, x)));
  }

  // Makes the window `factor` times as long around a moment, the middle if none is given.
  zoom(factor, around = (this.range[0] + this.range[1]) / 2) {
    const length = Math.max(MIN_WINDOW_NS, (this.range[1] - this.range[0]) * factor);
    const share = (around - this.range[0]) / (this.range[1] - this.range[0]);
    this.actions.range([around - share * length, around + (1 - share) * length]);
  }

  pan(share) {
    const moved = share * (this.range[1] - this.range[0]);
    this.actions.range([this.range[0] + moved, this.range[1] + moved]);
  }

  zoomToPass(event) {
    const found = this.found(...this.place(event));
    if (found && found.tasks)
      this.actions.range([found.begin + found.tasks.starts[0], found.begin + found.tasks.latest]);
  }

  // Four passes on, from the one that the first lane makes half-way.
  zoomToPasses() {
    const { placed } = this.rows[0].stream;
    const at = Math.max(0, above(placed, this.picture.step_time_ns / 2, (one) => one.begin) - 1);
    const last = placed[Math.min(placed.length - 1, at + 4)];
    this.actions.range([placed[at].begin, last.begin + last.tasks.latest]);
  }

  grab(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.grabbed = { x: this.place(event)[0], range: [...this.range] };
    this.tip.hidden = true;
  }

  key(event) {
    const act = {
      '+': () => this.zoom(0.5),
      '=': () => this.zoom(0.5),
      '-': () => this.zoom(2),
      0: () => this.actions.range(null),
      Home: () => this.actions.range(null),
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      Escape: () => this.canvas.blur(),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }
}

function timelineLegend(plan) {
  const shades = new Map();
  plan.timeline.kinds.forEach((kind) => {
    const shade = kindColour(kind);
    const name = ['activation', 'parameter', 'gradient', 'operator'].includes(shade)
      ? `${shade}s on the wire`.replace('operators on', 'inside operators, on')
      : words(kind);
    if (!shades.has(shade)) shades.set(shade, name);
  });
  return el(
    'ul',
    { class: 'legend inline' },
    [...shades].map(([shade, name]) => el('li', {}, swatch(shade), el('span', {}, name))),
    el('li', {}, swatch('ground'), el('span', {}, 'idle')),
  );
}

function timeline(plan, state, actions) {
  if (!plan.timeline) return howToGetATimeline(plan, 'the timeline of a step');
  const view = new Timeline(plan, state, actions);
  actions.views.push(view);
  const button = (text, label, act) => el('button', { type: 'button', 'aria-label': label, onclick: act }, text);
  return el(
    'div',
    {},
    el(
      'div',
      { class: 'tools', role: 'group', 'aria-label': 'timeline' },
      button('+', 'zoom in', () => view.zoom(0.5)),
      button('−', 'zoom out', () => view.zoom(2)),
      button('◂', 'earlier', () => view.pan(-0.3)),
      button('▸', 'later', () => view.pan(0.3)),
      button('whole step', 'show the whole step', () => actions.range(null)),
      button('a few passes', 'show a few passes in the middle', () => view.zoomToPasses()),
      el('span', { class: 'window note' }),
      el(
        'span',
        { class: 'note' },
        'Drag to move; ctrl and wheel, or the wheel after a click, to zoom; double-click fills the window with a ' +
          'pass. plan.timeline().save("trace.json") writes it for Perfetto.',
      ),
    ),
    view.element,
    timelineLegend(plan),
    laneTable(plan),
  );
}

// The timeline in numbers, for those who cannot see it and those who want to add up.
function laneTable(plan) {
  const rows = plan.timeline.lanes.map((lane) => [
    laneName(plan, lane),
    ranksText(lane.ranks),
    ...SPENT.map(([key]) => time(lane.breakdown[key])),
    bytes(lane.peak_bytes),
  ]);
  return el(
    'details',
    {},
    el('summary', {}, 'The lanes in numbers'),
    table(['lane', 'devices', ...SPENT.map(([, label]) => `${label}#`), 'peak memory#'], rows),
  );
}
