// Communication of a rank in a step: along which mesh axis, of what kind, how much and for how long.

function traffic(plan, state, actions) {
  const sent = Object.entries(plan.predicted.comm_bytes)
    .filter(([, size]) => size)
    .sort((a, b) => b[1] - a[1]);
  if (!sent.length) return el('p', {}, 'The devices send each other nothing.');
  const most = sent[0][1];
  const whole = table(
    ['collective', 'a rank hands to it in a step'],
    sent.map(([name, size]) => [name.replaceAll('_', '-'), meter(size, most, 'activation', bytes(size))]),
  );
  if (!plan.timeline) return el('div', {}, whole, howToGetATimeline(plan, 'how it spreads over the axes'));
  const { lanes } = plan.timeline;
  const number = chosenLane(plan, state, (lane) => lane.sent.reduce((sum, row) => sum + row[3], 0));
  return el(
    'div',
    {},
    laneButtons(plan, number, actions),
    byAxis(plan, lanes[number]),
    exposure(lanes[number], plan),
    el('details', {}, el('summary', {}, 'By collective, of the rank that sends most'), whole),
  );
}

const total = (rows, column) => rows.reduce((sum, row) => sum + row[column], 0);

function byAxis(plan, lane) {
  const stage =
    plan.stages.find((other) => other.ranks[0] <= lane.ranks[0] && lane.ranks[0] <= other.ranks[1]) || plan.stages[0];
  const layout = plan.layouts[stage.layout].filter((axis) => !isMicrobatch(axis));
  const axes = [...new Set(lane.sent.map((row) => row[0]))].sort((a, b) => a - b);
  const kinds = [...new Set(lane.sent.map((row) => row[1]))].sort();
  const most = Math.max(...lane.sent.map((row) => row[3]), 1);
  const cell = (row) =>
    row
      ? [
          meter(row[3], most, kindColour(row[1]), bytes(row[3])),
          el('span', { class: 'note' }, `${grouped(row[2])} × ${time(row[4] / row[2])} = ${time(row[4])}`),
        ]
      : '';
  const rows = kinds.map((kind) => [
    el('span', {}, swatch(kindColour(kind)), ` ${kind.replaceAll('_', '-')}`),
    ...axes.map((axis) => cell(lane.sent.find((row) => row[0] === axis && row[1] === kind))),
  ]);
  rows.push([
    el('b', {}, 'together'),
    ...axes.map((axis) => {
      const own = lane.sent.filter((row) => row[0] === axis);
      return el('b', {}, `${bytes(total(own, 3))}, ${time(total(own, 4))} on the wire`);
    }),
  ]);
  const headings = axes.map((axis) =>
    axis < 0 ? 'between stages' : `${axisText(layout[axis])}, ${linkText(layout[axis])}`,
  );
  return table(['of a rank in a step', ...headings], rows, { class: 'traffic' });
}

function exposure(lane, plan) {
  const waits = Object.entries(lane.exposed).sort((a, b) => b[1] - a[1]);
  if (!waits.length) return el('p', { class: 'note' }, 'All of it runs beside compute.');
  return el(
    'div',
    {},
    el('h3', {}, 'What compute waits for'),
    stacked(
      waits.map(([kind, ns]) => [kind.replaceAll('_', '-'), ns, kindColour(kind)]),
      waits.reduce((sum, row) => sum + row[1], 0),
      time,
    ),
  );
}

function laneName(plan, lane) {
  const found = plan.stages
    .map((stage, number) => [stage, number])
    .filter(([stage]) => stage.ranks[0] === lane.ranks[0] && stage.ranks[1] === lane.ranks[1])
    .map(([, number]) => number);
  return plan.stages.length > 1 && found.length ? `stage ${found.join(', ')}` : ranksText(lane.ranks);
}

function chosenLane(plan, state, weight) {
  const { lanes } = plan.timeline;
  if (state.lane !== null && state.lane < lanes.length) return state.lane;
  return lanes.reduce((best, lane, number) => (weight(lane) > weight(lanes[best]) ? number : best), 0);
}

function laneButtons(plan, number, actions) {
  if (plan.timeline.lanes.length < 2) return null;
  return el(
    'div',
    { class: 'lanes', role: 'group', 'aria-label': 'devices' },
    plan.timeline.lanes.map((lane, position) =>
      el(
        'button',
        {
          type: 'button',
          'aria-pressed': String(position === number),
          onclick: () => actions.lane(position),
        },
        laneName(plan, lane),
      ),
    ),
  );
}

function howToGetATimeline(plan, what) {
  return el(
    'div',
    { class: 'hint' },
    el(
      'p',
      {},
      `This plan was read from a file, which holds no graph of the model; ${what} takes a simulation of it. ` +
        'Either of these makes this page with it:',
    ),
    el(
      'pre',
      {},
      'autopar.parallelize(model, mesh, example_inputs, plan=plan).plan.report("plan.html")\n\n' +
        'autopar report plan.json models.gpt:gpt2 -o plan.html',
    ),
  );
}
