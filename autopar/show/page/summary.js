// What the plan is, in words and a few figures; where the time and the memory go.

const SPENT = [
  ['compute_ns', 'compute', 'compute'],
  ['recompute_ns', 'recomputation', 'recompute'],
  ['exposed_communication_ns', 'exposed communication', 'activation'],
  ['bubble_ns', 'pipeline bubble', 'idle'],
  ['optimizer_ns', 'optimizer', 'optimizer'],
];

const MEMORY_COLOURS = {
  parameters: 'm0',
  gradients: 'm1',
  optimizer: 'm2',
  activations: 'm3',
  'activation gradients': 'm4',
  gathered: 'm5',
  'gradients under way': 'm6',
  'between stages': 'm7',
  constants: 'm8',
  workspace: 'm9',
  inputs: 'm10',
};
const memoryColour = (kind) => MEMORY_COLOURS[kind] || 'm11';

function summary(plan) {
  const { predicted } = plan;
  const worst = SPENT.reduce((most, row) => (predicted.breakdown[row[0]] > predicted.breakdown[most[0]] ? row : most));
  return el(
    'div',
    {},
    el('p', { class: 'sentence' }, sentence(plan)),
    el(
      'div',
      { class: 'figures' },
      figure('step time', time(predicted.step_time_ns), `most of it: ${worst[1]}`),
      predicted.step_time_interval_ns
        ? figure('in nine of ten runs', predicted.step_time_interval_ns.map(time).join(' to '), 'by the profile’s residuals')
        : '',
      figure(
        'peak memory of a device',
        bytes(predicted.peak_bytes),
        plan.memory_limit
          ? `${percent(predicted.peak_bytes, plan.memory_limit)} of ${bytes(plan.memory_limit)}`
          : 'no limit',
      ),
      predicted.taken_bytes
        ? figure(
            'taken of a device',
            bytes(predicted.taken_bytes),
            `of ${bytes(predicted.capacity_bytes)}; ` +
              (predicted.tight_bytes ? '' : 'fits ') +
              `with ${(100 * predicted.fits_probability).toFixed(1)}%` +
              (predicted.tight_bytes ? ` below the ${bytes(predicted.tight_bytes)} from which its allocator thrashes` : '') +
              (predicted.refilling_ns ? `; so full that a step may take ${time(predicted.refilling_ns)} more` : ''),
          )
        : '',
      figure(
        'computing',
        percent(predicted.breakdown.compute_ns, predicted.step_time_ns),
        'of the step, on the device that ends last',
      ),
      figure('lower bound', time(predicted.lower_bound_ns), 'work of the busiest stream; nothing can hide more'),
    ),
    el('h3', {}, 'Where the time of a step goes'),
    stacked(
      SPENT.map(([key, label, shade]) => [label, predicted.breakdown[key], shade]),
      predicted.step_time_ns,
      time,
    ),
    el('h3', {}, 'What is in memory at the peak'),
    memoryBar(plan, predicted.memory, predicted.peak_bytes),
  );
}

// Against the limit, unless the peak would be a sliver of it.
function memoryBar(plan, kinds, peak) {
  const isSmall = peak * 5 < plan.memory_limit;
  return el(
    'div',
    {},
    stacked(byKind(kinds), isSmall ? peak : Math.max(plan.memory_limit, peak), bytes, 'free under the limit'),
    isSmall
      ? el(
          'p',
          { class: 'note' },
          `All of it is ${percent(peak, plan.memory_limit)} of the limit of ${bytes(plan.memory_limit)}.`,
        )
      : null,
  );
}

function byKind(memory) {
  return Object.entries(memory)
    .sort((a, b) => b[1] - a[1])
    .map(([kind, size]) => [kind, size, memoryColour(kind)]);
}

function sentence(plan) {
  const forks = plan.forks.map(([text, count]) => text + (count > 1 ? ` ×${count}` : ''));
  const stages = plan.stages.length;
  const layout = plan.layouts[0].filter((axis) => !isMicrobatch(axis));
  const same = plan.layouts.length === 1 ? `${stages > 1 ? 'each ' : ''}${meshText(layout)}` : 'of different shapes';
  const parts =
    stages > 1 ? `cut into ${stages} pipeline stages (${plan.schedule}), ${same}` : `seen as ${meshText(layout)}`;
  return (
    `${plan.mode === 'train' ? 'One training step' : 'One inference batch'} of ${plan.model} on ` +
    `${plural(plan.num_devices, 'device')} (${plan.mesh}), ${parts}, ` +
    `in ${plural(plan.microbatches, 'microbatch').replace(/hs$/, 'hes')}` +
    `${plan.precision ? `, ${plan.precision}` : ''}${plan.mode === 'train' ? `, ${plan.optimizer}` : ''}.` +
    `${plan.routing ? ` Tokens choose experts by ${plan.routing}.` : ''}` +
    `${plan.recompute ? ` Computed again in the backward pass: ${plan.recompute}.` : ''}` +
    `${plan.copied_out ? ` Activations that wait on the host: ${plan.copied_out}.` : ''}` +
    `${plan.offload ? ` On the host: ${plan.offload}.` : ''}` +
    `${forks.length ? ` Branches run beside each other: ${forks.join('; ')}.` : ''}` +
    `${plan.shares.length ? ` Unequal ${plan.shares.join('; ')}.` : ''}`
  );
}

function figure(label, value, note) {
  return el(
    'div',
    { class: 'figure' },
    el('span', { class: 'label' }, label),
    el('span', { class: 'value' }, value),
    el('span', { class: 'note' }, note),
  );
}

// A bar of parts of a whole, and the list of them with their numbers; `rest` names what is left.
function stacked(parts, whole, format, rest) {
  const shown = parts.filter((part) => part[1] > 0);
  const left = whole - shown.reduce((sum, part) => sum + part[1], 0);
  const bars = shown.map(([label, size, shade]) =>
    el('div', {
      class: 'part',
      title: `${label}: ${format(size)}, ${percent(size, whole)}`,
      style: { width: `${(100 * size) / whole}%`, background: `var(--${shade})` },
    }),
  );
  const items = shown.map(([label, size, shade]) =>
    el(
      'li',
      {},
      swatch(shade),
      el('span', {}, label),
      el('b', {}, format(size)),
      el('span', { class: 'note' }, percent(size, whole)),
    ),
  );
  if (rest && left > 0)
    items.push(
      el(
        'li',
        {},
        swatch('ground'),
        el('span', {}, rest),
        el('b', {}, format(left)),
        el('span', { class: 'note' }, percent(left, whole)),
      ),
    );
  return el(
    'div',
    { class: 'stacked' },
    el('div', { class: 'bar', 'aria-hidden': 'true' }, bars),
    el('ul', { class: 'legend' }, items),
  );
}

function swatch(shade) {
  return el('i', { class: 'swatch', style: { background: `var(--${shade})` }, 'aria-hidden': 'true' });
}

function stages(plan) {
  const lanes = plan.timeline ? plan.timeline.lanes : [];
  const whole = plan.stages[0];
  const unlike = plan.stages.length === 1 && lanes.length > 1; // ranks of one stage that differ in devices or in work
  const parts = unlike ? lanes.map((lane) => ({ ...whole, ranks: lane.ranks })) : plan.stages;
  const rows = parts.map((stage, number) => {
    const lane = lanes.find((other) => other.ranks[0] === stage.ranks[0]);
    const busy = lane ? lane.breakdown.compute_ns + lane.breakdown.recompute_ns + lane.breakdown.optimizer_ns : 0;
    return [
      unlike ? '0' : String(number),
      el('span', { class: 'nowrap' }, ranksText(stage.ranks)),
      meshText(plan.layouts[stage.layout].filter((axis) => !isMicrobatch(axis))),
      stage.blocks || 'the whole model',
      grouped(stage.operators),
      lane ? meter(busy, plan.timeline.step_time_ns, 'compute', percent(busy, plan.timeline.step_time_ns)) : '–',
      lane ? meter(lane.peak_bytes, plan.memory_limit || lane.peak_bytes, 'm3', bytes(lane.peak_bytes)) : '–',
    ];
  });
  return el(
    'div',
    {},
    table(['stage', 'devices', 'as', 'runs', 'operators#', 'busy', 'peak memory'], rows),
    el(
      'p',
      { class: 'note' },
      'Axes: ',
      plan.layouts[0].map((axis) =>
        el(
          'span',
          { class: 'axis' },
          axisText(axis),
          isMicrobatch(axis) ? ', one after another' : `, ${linkText(axis)}`,
        ),
      ),
    ),
  );
}

function meter(part, whole, shade, text) {
  return el(
    'div',
    { class: 'meter' },
    el(
      'div',
      { class: 'track' },
      el('div', {
        class: 'fill',
        style: { width: `${Math.min(100, (100 * part) / whole)}%`, background: `var(--${shade})` },
      }),
    ),
    el('span', {}, text),
  );
}
