// What a row of the tree says in full: placements, devices, what moves it, and why it is placed so.

// A dotted name that may go on in the next line after a dot.
function breakable(name) {
  return name.split(/(?<=\.)/).map((text) => [text, el('wbr')]);
}

// What a row of the tree says in full.
function details(plan, key) {
  const found = [...walk(plan.tree)].find((item) => item.key === key);
  if (!found || !found.row)
    return el(
      'p',
      { class: 'note' },
      'Choose a tensor or an operator: how it lies on the devices, what moves it, and what else it could have been.',
    );
  const { row, module } = found;
  const layout = plan.layouts[row.layout];
  return el(
    'div',
    {},
    el(
      'h3',
      {},
      breakable(row.kind === 'parameter' ? row.name : `${module.path ? `${module.path}: ` : ''}${row.label}`),
    ),
    el(
      'p',
      { class: 'note' },
      [
        row.kind === 'operator' ? `operator ${row.name}` : row.kind === 'received' ? 'made by another stage' : row.kind,
        row.type,
        row.source,
        row.at && `runs at ${row.at} alone`,
        row.note,
      ]
        .filter(Boolean)
        .join(' · '),
    ),
    el('dl', {}, facts(row, layout)),
    meshPicture(plan, row, layout),
    row.moves ? [el('h4', {}, 'Then moved'), row.moves.map((move) => moveText(move, layout))] : null,
    decision(row.choice, layout.some(isMicrobatch)),
  );
}

function facts(row, layout) {
  const pairs =
    row.kind === 'operator'
      ? [
          ['operands', (row.in || []).map((text) => tiles(text, layout))],
          ['results', (row.out || []).map((text) => tiles(text, layout))],
        ]
      : [
          [row.used ? 'stored' : 'placed', tiles(row.stored || '', layout)],
          ['used', row.used && row.used.map((text) => tiles(text, layout))],
        ];
  return pairs
    .filter(([, content]) => content && (!Array.isArray(content) || content.length))
    .map(([name, content]) => [el('dt', {}, name), el('dd', {}, content)]);
}

function moveText(move, layout) {
  const steps = move.steps.map(([axis, before, after, sent, back]) =>
    el(
      'li',
      {},
      el('b', {}, axis),
      ` ${before} → ${after}: `,
      axis === 'microbatch'
        ? 'nothing sent, microbatches follow each other'
        : sent
          ? sent.replaceAll('_', '-')
          : 'nothing sent',
      back ? `, backward ${back.replaceAll('_', '-')}` : '',
    ),
  );
  return el('div', { class: 'move' }, el('span', {}, 'to ', tiles(move.to, layout)), el('ul', {}, steps));
}

function decision(choice, hasMicrobatches) {
  if (!choice) return null;
  const rows = choice.alternatives.map(([option, ns, size, compute, isForbidden]) => [
    option,
    isForbidden ? 'against a constraint' : signed(ns, time),
    isForbidden || compute === null ? '–' : signed(compute, time),
    isForbidden || compute === null ? '–' : signed(ns - compute, time),
    size ? signed(size, bytes) : '–',
  ]);
  const hidden = choice.num_options - 1 - rows.length;
  return el(
    'div',
    {},
    el('h4', {}, 'Why so'),
    el(
      'p',
      {},
      `Chosen of ${plural(choice.num_options, 'option')}: ${choice.chosen}` +
        `${choice.cost_ns ? `, which costs ${time(choice.cost_ns)} a step` : ''}` +
        `${choice.count > 1 ? `, in ${choice.count} equal blocks together` : ''}.` +
        `${hasMicrobatches ? ' (The microbatch axis, which comes first in the tiles, is left out here.)' : ''}`,
    ),
    rows.length
      ? table(['instead', 'time#', 'compute#', 'redistribution#', 'memory#'], rows)
      : el('p', { class: 'note' }, 'Nothing else is possible.'),
    hidden > 0
      ? el('p', { class: 'note' }, `and ${hidden} more, which cost no less. Every other decision stays as it is.`)
      : null,
  );
}
