// The devices of a stage as a grid over its axes, coloured by which slice of a tensor each holds.

const MOST_CELLS = 16;

// Indexes to draw of an axis; null stands for those left out.
function drawn(size) {
  const all = [...Array(Math.min(size, MOST_CELLS)).keys()];
  return size <= MOST_CELLS ? all : [...all.slice(0, MOST_CELLS - 2), null, size - 1];
}

function meshPicture(plan, row, layout) {
  const placement = row.kind === 'operator' ? (row.out || [])[0] : row.stored;
  const real = layout.map((axis, position) => ({ ...axis, position })).filter((axis) => !isMicrobatch(axis));
  if (!placement || !real.length) return null;
  const types = parsed(placement);
  const shape = row.type
    ? row.type
        .slice(row.type.indexOf('[') + 1, -1)
        .split(', ')
        .filter(Boolean)
        .map(Number)
    : null;
  const stage = plan.stages[row.stages[0]];
  const caption = el('p', { class: 'note caption', 'aria-live': 'polite' }, 'Point at a device to see what it holds.');
  const [outer, rows, columns] = real.length > 2 ? real : real.length === 2 ? [null, ...real] : [null, null, real[0]];
  const grid = el('div', {
    class: 'grids',
    tabindex: 0,
    'aria-label': 'devices; arrow keys move',
    onkeydown: (event) => move(event),
  });
  for (const block of outer ? drawn(outer.size) : [0])
    grid.append(block === null ? el('span', { class: 'gap' }, '…') : blockOf(block));
  return el(
    'div',
    { class: 'mesh' },
    el('h4', {}, `Over the devices of stage ${row.stages[0]}`.replace(plan.stages.length > 1 ? '' : / of stage 0/, '')),
    el(
      'p',
      { class: 'note' },
      [outer && `a box each ${axisText(outer)}`, rows && `down ${axisText(rows)}`, `across ${axisText(columns)}`]
        .filter(Boolean)
        .join(', '),
    ),
    grid,
    caption,
  );

  function blockOf(block) {
    const across = drawn(columns.size);
    const box = el('div', { class: 'grid', style: { 'grid-template-columns': `repeat(${across.length}, auto)` } });
    for (const down of rows ? drawn(rows.size) : [0]) {
      for (const index of across)
        box.append(down === null || index === null ? el('span', { class: 'gap' }, '…') : cell(block, down, index));
    }
    return box;
  }

  function cell(block, down, index) {
    const coordinate = layout.map(() => 0);
    if (outer) coordinate[outer.position] = block;
    if (rows) coordinate[rows.position] = down;
    coordinate[columns.position] = index;
    const [number, count] = sliceNumber(types, layout, coordinate);
    const sums = types.some((type) => type.kind === 'P');
    const share = count > 1 ? number / (count - 1) : 0;
    const node = el(
      'span',
      { class: `device${sums ? ' P' : ''}${share > 0.5 ? ' deep' : ''}`, style: { '--share': share } },
      sums ? '+' : String(number),
    );
    node.addEventListener('mouseenter', () => tell(node, coordinate));
    return node;
  }

  function tell(node, coordinate) {
    grid.querySelectorAll('.here').forEach((other) => other.classList.remove('here'));
    node.classList.add('here');
    const rank = stage.ranks[0] + real.reduce((sum, axis) => sum + axis.stride * coordinate[axis.position], 0);
    const place = real.map((axis) => `${axis.name}=${coordinate[axis.position]}`).join(', ');
    caption.textContent = `rank ${rank} (${place}): ${held(shape, types, layout, coordinate, row)}`;
  }

  function move(event) {
    const cells = [...grid.querySelectorAll('.device')];
    const width = drawn(columns.size).filter((index) => index !== null).length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width }[event.key];
    if (!step) return;
    const next = cells[cells.findIndex((node) => node.classList.contains('here')) + step] || cells[0];
    next.dispatchEvent(new MouseEvent('mouseenter'));
    event.preventDefault();
  }
}

// Which of how many slices a device holds: devices with one number hold the same.
function sliceNumber(types, layout, coordinate) {
  let number = 0;
  let count = 1;
  types.forEach((type, axis) => {
    if (type.kind !== 'S' || isMicrobatch(layout[axis])) return;
    number = number * layout[axis].size + coordinate[axis];
    count *= layout[axis].size;
  });
  return [number, count];
}

function held(shape, types, layout, coordinate, row) {
  const sum = types.some((type, axis) => type.kind === 'P' && !isMicrobatch(layout[axis])) ? 'a summand of ' : '';
  if (!shape) {
    const cuts = types.map((type, axis) =>
      type.kind === 'S' ? `slice ${coordinate[axis]} of ${layout[axis].size} along dim ${type.dim}` : null,
    );
    return sum + (cuts.filter((text, axis) => text && !isMicrobatch(layout[axis])).join(', ') || 'the whole tensor');
  }
  const cut = sliceAt(shape, types, layout, coordinate, row.kind === 'parameter');
  const ranges = cut.map(([start, length], dim) =>
    length === shape[dim] ? ':' : length ? `${start}:${start + length}` : 'nothing',
  );
  const micro = types.some((type, axis) => type.kind === 'S' && isMicrobatch(layout[axis]))
    ? ' in the first microbatch'
    : '';
  return `${sum}[${ranges.join(', ')}] of ${row.type}${micro}`;
}
