// Puts the page together, and keeps what the reader has opened, chosen and zoomed to.

const data = JSON.parse(document.getElementById('data').textContent);
const longest = Math.max(
  ...data.plans.map((plan) => (plan.timeline ? plan.timeline.step_time_ns : plan.predicted.step_time_ns)),
  1,
);
const state = {
  shown: data.plans.map((_, number) => number),
  open: openAtFirst(data.plans[0]),
  every: new Set(),
  selected: null,
  query: '',
  range: [0, longest],
  lane: null,
};
data.plans.slice(1).forEach((plan) => openAtFirst(plan).forEach((key) => state.open.add(key)));

const SECTIONS = [
  ['summary', 'The plan', '', summary],
  ['stages', 'Devices', 'Devices with equal work are one row.', stages],
  [
    'model',
    'Model and placements',
    'Every tensor as it lies on the mesh. Equal blocks are one row (×n). ' +
      'At the right: communication that follows, and compute time a step of one block.',
    modelPanel,
  ],
  ['timeline', 'One step, simulated', '', timeline],
  ['memory', 'Memory over the step', '', memory],
  ['traffic', 'Communication', '', traffic],
  ...(data.observed ? [['observed', 'One step, as it ran', '', observedStep]] : []),
  ['substitutions', 'Substitutions', '', substitutions],
  ['search', 'Search', '', search],
  ['provenance', 'Where the figures come from', '', provenance],
];

const actions = {
  views: [],
  toggle(key) {
    if (!state.open.delete(key)) upwards(key).forEach((one) => state.open.add(one));
    redraw('model', key);
  },
  showEvery(key) {
    state.every.add(key);
    redraw('model', key);
  },
  select(key) {
    state.selected = key;
    redraw('model', key);
  },
  lane(number) {
    state.lane = number;
    redraw('memory');
    redraw('traffic');
  },
  range(wanted) {
    const [begin, end] = wanted || [0, longest];
    const length = Math.min(longest, end - begin);
    const first = Math.max(0, Math.min(longest - length, begin));
    state.range = [first, first + length];
    actions.views.forEach((view) => view.draw());
    tellWindow();
  },
  differs(key, plan) {
    if (data.plans.length < 2) return false;
    const other = data.plans.find((one) => one !== plan);
    return placements(plan).has(key) && placements(plan).get(key) !== placements(other).get(key);
  },
};

// A module's path and those around it: another plan may fold them in another way.
function upwards(path) {
  const names = path.split('.');
  return names.map((_, at) => names.slice(0, at + 1).join('.'));
}

// What each row of a plan's tree is placed as, by key.
function placements(plan) {
  if (!plan.placements) {
    plan.placements = new Map();
    for (const { row, module, key } of walk(plan.tree)) {
      const names = (list) => (list || []).join(' | ');
      const axes = row && plan.layouts[row.layout].map(axisText).join(' ');
      plan.placements.set(
        key,
        row
          ? [axes, row.stored, names(row.used), names(row.in), names(row.out), row.at, row.note].join('; ')
          : String(module.recomputed),
      );
    }
  }
  return plan.placements;
}

function modelPanel(plan) {
  const search = el('input', {
    type: 'search',
    class: 'find',
    placeholder: 'find a module, tensor, operator or source line',
    'aria-label': 'find in the model',
    value: state.query,
    oninput: (event) => {
      state.query = event.target.value;
      redraw('model', null, event.target);
    },
  });
  return el(
    'div',
    {},
    el('div', { class: 'tools' }, search),
    plan.layouts.map((layout) => legend(layout)).slice(0, 1),
    el(
      'div',
      { class: 'split' },
      tree(plan, state, actions),
      el('aside', { class: 'details', 'aria-live': 'polite' }, details(plan, state.selected)),
    ),
  );
}

function difference() {
  const [a, b] = data.plans;
  const rows = [
    ['step time', 'step_time_ns', time],
    ['peak memory', 'peak_bytes', bytes],
    ['lower bound', 'lower_bound_ns', time],
  ].map(([label, key, format]) => row(label, a.predicted[key], b.predicted[key], format));
  rows.push(...SPENT.map(([key, label]) => row(label, a.predicted.breakdown[key], b.predicted.breakdown[key], time)));
  const kinds = [...new Set([...Object.keys(a.predicted.comm_bytes), ...Object.keys(b.predicted.comm_bytes)])];
  rows.push(
    ...kinds.map((kind) =>
      row(kind.replaceAll('_', '-'), a.predicted.comm_bytes[kind] || 0, b.predicted.comm_bytes[kind] || 0, bytes),
    ),
  );
  return el(
    'div',
    {},
    table(['', 'A#', 'B#', 'B against A#'], rows),
    data.difference.length
      ? [
          el('h3', {}, 'What differs, A | B'),
          el(
            'ul',
            { class: 'difference' },
            data.difference.map((line) => el('li', {}, el('code', {}, line))),
          ),
        ]
      : el('p', {}, 'They place everything alike.'),
  );

  function row(label, first, second, format) {
    const share = first ? ` (${change(first, second)})` : '';
    return [
      label,
      format(first),
      format(second),
      second === first ? 'the same' : `${signed(second - first, format)}${share}`,
    ];
  }
}

function header() {
  const [plan] = data.plans;
  const choices =
    data.plans.length > 1
      ? [
          ['A', [0]],
          ['B', [1]],
          ['side by side', [0, 1]],
        ]
      : [];
  return el(
    'header',
    {},
    el(
      'h1',
      {},
      plan.model,
      el(
        'span',
        { class: 'note' },
        data.plans
          .map((one) => one.mesh)
          .filter((mesh, at, all) => all.indexOf(mesh) === at)
          .join(' and '),
      ),
    ),
    el(
      'nav',
      { 'aria-label': 'sections' },
      SECTIONS.map(([id, title]) => el('a', { href: `#${id}` }, title)),
    ),
    choices.length
      ? el(
          'div',
          { class: 'switch', role: 'group', 'aria-label': 'plans' },
          choices.map(([label, shown]) =>
            el(
              'button',
              {
                type: 'button',
                'aria-pressed': String(shown.join() === state.shown.join()),
                onclick: () => {
                  state.shown = shown;
                  render();
                },
              },
              label,
            ),
          ),
        )
      : null,
    el('button', { type: 'button', class: 'theme', onclick: switchTheme, 'aria-label': 'light or dark' }, '◐'),
  );
}

function switchTheme() {
  const dark =
    getComputedStyle(document.documentElement).colorScheme === 'dark' ||
    (!document.documentElement.style.colorScheme && matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.style.colorScheme = dark ? 'light' : 'dark';
  forgetColours();
  actions.views.forEach((view) => view.draw());
}

function section([id, title, about, make]) {
  return el(
    'section',
    { id, 'aria-labelledby': `${id}-title` },
    el('h2', { id: `${id}-title` }, title),
    about ? el('p', { class: 'note' }, about) : null,
    body(make),
  );
}

function body(make) {
  return el(
    'div',
    { class: `columns n${state.shown.length}` },
    state.shown.map((number) =>
      el(
        'div',
        { class: 'column' },
        data.plans.length > 1 ? el('h3', { class: 'which' }, data.plans[number].name) : null,
        make(data.plans[number], state, actions),
      ),
    ),
  );
}

// Makes one section anew; the row with the key, or the search box, keeps the focus.
function redraw(id, key, typed) {
  const [, , , make] = SECTIONS.find((one) => one[0] === id);
  const own = document.getElementById(id);
  const column = document.activeElement
    ? [...own.querySelectorAll('.column')].findIndex((one) => one.contains(document.activeElement))
    : -1;
  actions.views = actions.views.filter((view) => !own.contains(view.element));
  own.querySelector('.columns').replaceWith(body(make));
  const home = own.querySelectorAll('.column')[Math.max(0, column)];
  if (typed) {
    const input = home.querySelector('.find');
    input.focus();
    input.setSelectionRange(typed.selectionStart, typed.selectionEnd);
  } else if (key) home.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  tellWindow();
}

function tellWindow() {
  const [begin, end] = state.range;
  const text = (ns) => scaleText(ns, (end - begin) / 100);
  document.querySelectorAll('.window').forEach((node) => {
    node.textContent = `${text(begin)} to ${text(end)}, ${time(end - begin)} long`;
  });
}

function render() {
  actions.views = [];
  document.body.replaceChildren(
    probe,
    header(),
    el(
      'main',
      {},
      data.plans.length > 1
        ? el(
            'section',
            { id: 'difference', 'aria-labelledby': 'difference-title' },
            el('h2', { id: 'difference-title' }, 'A and B'),
            difference(),
          )
        : null,
      SECTIONS.map(section),
    ),
  );
  tellWindow();
}

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  forgetColours();
  actions.views.forEach((view) => view.draw());
});
render();
// Two frames later, everything that was put into the page has been laid out and drawn.
requestAnimationFrame(() =>
  requestAnimationFrame(() => {
    performance.mark('ready');
    document.documentElement.dataset.ready = 'true';
  }),
);
