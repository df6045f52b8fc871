// The model's modules with the placements of everything in them; equal numbered blocks are one row.

const MANY_ROWS = 24;

// Every module and row below, with its depth and a key that is the same in another plan of the model.
function* walk(module, depth = 0) {
  yield { module, depth, key: module.path || '(model)' };
  for (const row of module.rows) yield { row, module, depth: depth + 1, key: `${module.path}/${row.kind}/${row.name}` };
  for (const child of module.modules) yield* walk(child, depth + 1);
}

// Opens modules level by level until a screen is full.
function openAtFirst(plan) {
  const root = plan.tree;
  const open = new Set(['(model)']);
  let level = [root];
  for (let shown = 0; level.length; level = level.flatMap((module) => module.modules)) {
    shown += level.reduce((sum, module) => sum + module.modules.length + notable(plan, module).length, 0);
    if (shown > MANY_ROWS) break;
    level.forEach((module) => open.add(module.path || '(model)'));
  }
  return open;
}

// Rows worth a look at first: what is stored or enters the model, operators that take time, and tensors that are sent.
function notable(plan, module) {
  return module.rows.filter((row) => {
    if (row.kind !== 'operator') return row.kind !== 'received';
    return (
      row.at ||
      (row.moves || []).some(isSent) ||
      (plan.timeline ? workOf(plan, row) * 2000 > plan.timeline.step_time_ns : row.choice)
    );
  });
}

const isSent = (move) => move.steps.some((step) => step[3] || step[4]);

// How long a row's operator keeps its devices busy in a step, all microbatches together; 0 where that is not known.
function workOf(plan, row) {
  if (!plan.timeline || row.kind !== 'operator') return 0;
  const first = plan.stages[row.stages[0]].ranks[0];
  const lane = plan.timeline.lanes.findIndex((one) => one.ranks[0] <= first && first <= one.ranks[1]);
  return lane < 0 ? 0 : workByName(plan, lane).get(row.name) || 0;
}

// Of a lane: the time of compute by the name of what it is for.
function workByName(plan, number) {
  plan.work ||= [];
  if (!plan.work[number]) {
    const { passes, names, streams, lanes } = plan.timeline;
    const compute = streams.indexOf('compute');
    const counts = new Map();
    lanes[number].passes[1].forEach((pass) => counts.set(pass, (counts.get(pass) || 0) + 1));
    const found = new Map();
    counts.forEach((count, pass) => {
      const [stream, name, , lengths] = passes[pass];
      stream.forEach((own, task) => {
        if (own === compute) found.set(names[name[task]], (found.get(names[name[task]]) || 0) + count * lengths[task]);
      });
    });
    plan.work[number] = found;
  }
  return plan.work[number];
}

function rowText(row, module) {
  return `${module.path} ${row.name} ${row.label} ${row.source || ''} ${row.type || ''}`.toLowerCase();
}

function tree(plan, state, actions) {
  const query = state.query.trim().toLowerCase();
  const list = el('div', {
    class: 'tree',
    role: 'tree',
    'aria-label': `modules of ${plan.model}`,
    onkeydown: (event) => treeKey(event, actions),
  });
  const matches = query ? matching(plan.tree, query) : null;
  draw(plan.tree, 0, false);
  const first = list.querySelector('.row.selected') || list.querySelector('.row');
  if (first) first.tabIndex = 0;
  const found = matches
    ? el(
        'p',
        { class: 'note', role: 'status' },
        `${plural(matches.hits, 'row')} found for “${state.query}”, equal blocks once`,
      )
    : null;
  return el('div', { class: 'modules' }, found, list);

  // Inside a fold, stages are those of the fold, not of the block that stands for all.
  function draw(module, depth, isFolded) {
    const key = module.path || '(model)';
    if (matches && !matches.modules.has(module)) return;
    const open = matches ? true : state.open.has(key);
    list.append(moduleRow(plan, module, depth, open, state, actions, isFolded));
    if (!open) return;
    const inFold = isFolded || module.count > 1;
    const rows = matches
      ? module.rows.filter((row) => matches.rows.has(row))
      : state.every.has(key)
        ? module.rows
        : notable(plan, module);
    rows.forEach((row) => list.append(tensorRow(plan, row, module, depth + 1, state, actions, inFold)));
    const hidden = module.rows.length - rows.length;
    if (hidden && !matches) list.append(moreRow(key, hidden, depth + 1, actions));
    module.modules.forEach((child) => draw(child, depth + 1, inFold));
  }
}

function matching(root, query) {
  const found = { modules: new Set(), rows: new Set(), hits: 0 };
  const visit = (module) => {
    const own = module.path.toLowerCase().includes(query) || module.name.toLowerCase().includes(query);
    const rows = module.rows.filter((row) => rowText(row, module).includes(query));
    rows.forEach((row) => found.rows.add(row));
    found.hits += rows.length + (own && !rows.length ? 1 : 0);
    const below = module.modules.map(visit).some(Boolean);
    if (own || rows.length || below) found.modules.add(module);
    return own || rows.length > 0 || below;
  };
  visit(root);
  return found;
}

function treeRow(attributes, depth, ...content) {
  return el(
    'div',
    { role: 'treeitem', 'aria-level': depth + 1, tabindex: -1, ...attributes, style: { '--depth': depth } },
    ...content,
  );
}

function moduleRow(plan, module, depth, open, state, actions, isFolded) {
  const key = module.path || '(model)';
  const operators = module.rows.filter((row) => row.kind === 'operator').length;
  const leaf = !module.rows.length && !module.modules.length;
  return treeRow(
    {
      class: `row module${state.selected === key ? ' selected' : ''}`,
      'data-key': key,
      'aria-expanded': leaf ? null : String(open),
      onclick: () => actions.toggle(key),
    },
    depth,
    el(
      'span',
      { class: 'name' },
      el('span', { class: 'twisty', 'aria-hidden': 'true' }, leaf ? '' : open ? '▾' : '▸'),
      el('b', {}, module.name),
      module.count > 1 && el('span', { class: 'count' }, `×${grouped(module.count)}`),
      module.recomputed && el('span', { class: 'badge' }, 'recomputed'),
    ),
    el(
      'span',
      { class: 'extra' },
      operators && open ? plural(operators, 'operator') : '',
      workText(moduleWork(plan, module)),
      isFolded ? null : stageText(plan, module.stages),
      differs(key, plan, actions),
    ),
  );
}

function stageText(plan, stages) {
  if (plan.stages.length < 2 || stages.length === plan.stages.length) return '';
  const last = stages[stages.length - 1];
  return el(
    'span',
    { class: 'stage' },
    stages.length === 1
      ? `stage ${stages[0]}`
      : last - stages[0] === stages.length - 1
        ? `stages ${stages[0]}–${last}`
        : `stages ${stages.join(', ')}`,
  );
}

function tensorRow(plan, row, module, depth, state, actions, isFolded) {
  const key = `${module.path}/${row.kind}/${row.name}`;
  return treeRow(
    {
      class: `row ${row.kind}${state.selected === key ? ' selected' : ''}`,
      'data-key': key,
      'aria-selected': String(state.selected === key),
      onclick: () => actions.select(key),
    },
    depth,
    el(
      'span',
      { class: 'name' },
      el('span', { class: 'label' }, row.label),
      row.type ? el('span', { class: 'type' }, row.type) : null,
      row.kind === 'received' ? el('span', { class: 'badge' }, 'from another stage') : null,
      row.kind === 'input' ? el('span', { class: 'badge' }, 'input') : null,
      row.at ? el('span', { class: 'badge' }, `at ${row.at} alone`) : null,
    ),
    el('span', { class: 'placed' }, rowTiles(plan, row)),
    el(
      'span',
      { class: 'extra' },
      chips(row.moves || []),
      workText(workOf(plan, row)),
      isFolded ? null : stageText(plan, row.stages),
      differs(key, plan, actions),
    ),
  );
}

function rowTiles(plan, row) {
  const layout = plan.layouts[row.layout];
  if (row.kind === 'operator') {
    return [
      joined(row.in || [], layout),
      el('span', { class: 'results' }, el('span', { class: 'arrow' }, '→ '), joined(row.out || [], layout)),
    ];
  }
  if (!row.used) return tiles(row.stored || '', layout);
  const used = row.used.filter((text) => text !== row.stored);
  return [
    tiles(row.stored || '', layout),
    used.length ? [el('span', { class: 'arrow', title: 'used as' }, '→'), joined(used, layout)] : null,
  ];
}

// Equal operands are drawn once.
function joined(placements, layout) {
  const counts = new Map();
  placements.forEach((text) => counts.set(text, (counts.get(text) || 0) + 1));
  return [...counts].map(([text, count]) => [
    tiles(text, layout),
    count > 1 ? el('span', { class: 'count' }, `×${count}`) : null,
  ]);
}

// The communication that follows, each kind once: "all-gather ×2".
function chips(moves) {
  const counts = new Map();
  moves.filter(isSent).forEach((move) => {
    const [forward, backward] = [3, 4].map((column) =>
      [...new Set(move.steps.map((step) => step[column]).filter(Boolean))].join(' + '),
    );
    const text = forward || `backward ${backward}`;
    counts.set(text, (counts.get(text) || 0) + 1);
  });
  return [...counts].map(([text, count]) =>
    el('span', { class: 'chip' }, text.replaceAll('_', '-'), count > 1 ? ` ×${count}` : ''),
  );
}

// Of one block where several are folded, with all that is below it.
function moduleWork(plan, module) {
  const own = module.rows.reduce((sum, row) => sum + workOf(plan, row), 0);
  return module.modules.reduce((sum, child) => sum + child.count * moduleWork(plan, child), own);
}

function workText(work) {
  return work
    ? el('span', { class: 'work', title: 'of compute in a step, forward and backward, all microbatches' }, time(work))
    : null;
}

function moreRow(key, hidden, depth, actions) {
  return treeRow(
    { class: 'row more', 'data-key': `${key}/more`, onclick: () => actions.showEvery(key) },
    depth,
    el('span', { class: 'name' }, `… and ${plural(hidden, 'more row')}`),
  );
}

// A sign on what another plan places in another way.
function differs(key, plan, actions) {
  return actions.differs(key, plan)
    ? el('span', { class: 'differs', title: 'the other plan has this in another way' }, '≠')
    : null;
}

function treeKey(event, actions) {
  const row = event.target.closest('.row');
  if (!row) return;
  const rows = [...event.currentTarget.querySelectorAll('.row')];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const open = row.getAttribute('aria-expanded');
  if (step) rows[rows.indexOf(row) + step]?.focus();
  else if (event.key === 'Enter' || event.key === ' ') row.click();
  else if ((event.key === 'ArrowRight' && open === 'false') || (event.key === 'ArrowLeft' && open === 'true'))
    row.click();
  else if (event.key === 'ArrowLeft')
    rows
      .slice(0, rows.indexOf(row))
      .reverse()
      .find((other) => Number(other.getAttribute('aria-level')) < Number(row.getAttribute('aria-level')))
      ?.focus();
  else return;
  event.preventDefault();
}
