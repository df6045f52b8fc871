// Placements as tiles: one a mesh axis, with a letter, so that colour is never the only sign.

const MEANING = {
  S: (dim) => `slices along dim ${dim}`,
  R: () => 'the whole tensor on each rank; gradients are summands',
  I: () => 'the whole tensor and the whole gradient on each rank',
  P: () => 'a summand on each rank',
};

function parsed(placement) {
  return placement
    .split(' ')
    .filter(Boolean)
    .map((text) => ({ kind: text[0], dim: text[0] === 'S' ? Number(text.slice(2, -1)) : -1 }));
}

function tiles(placement, layout) {
  const types = parsed(placement);
  const text = types.map((type, axis) => `${layout[axis].name}: ${tileText(type)}`).join(', ');
  return el(
    'span',
    { class: 'tiles', role: 'img', 'aria-label': text || 'one device' },
    types.map((type, axis) => tile(type, layout[axis])),
  );
}

function tile(type, axis) {
  const isCut = isMicrobatch(axis) && type.kind === 'S';
  const dim = type.kind === 'S' ? ` d${Math.min(type.dim, 3)}` : '';
  return el(
    'span',
    {
      class: `tile ${type.kind}${dim}${isMicrobatch(axis) ? ' micro' : ''}`,
      title: `${axisText(axis)}: ${tileText(type)}, ${isCut ? 'cut into microbatches' : MEANING[type.kind](type.dim)}`,
    },
    tileText(type),
  );
}

const tileText = (type) => (type.kind === 'S' ? `S${type.dim}` : type.kind);

function legend(layout) {
  const axis = { name: 'axis', size: 1, near: 1 };
  const shown = [
    ['S', 0],
    ['S', 1],
    ['S', 2],
    ['R', -1],
    ['I', -1],
    ['P', -1],
  ];
  return el(
    'div',
    { class: 'key' },
    el('span', {}, 'Tiles from left to right are the mesh axes ', el('b', {}, meshText(layout)), '. '),
    shown.map(([kind, dim]) => el('span', { class: 'entry' }, tile({ kind, dim }, axis), ` ${MEANING[kind](dim)}`)),
  );
}

// How a chunk of a dim is cut: what torch.chunk gives part `index`, or an axis with shares; [start, length].
function part([start, length], axis, index) {
  if (axis.shares.length) {
    const unit = length / axis.shares.reduce((a, b) => a + b);
    const before = axis.shares.slice(0, index).reduce((a, b) => a + b, 0);
    return [start + unit * before, unit * axis.shares[index]];
  }
  const chunk = Math.ceil(length / axis.size);
  const begin = Math.min(length, index * chunk);
  return [start + begin, Math.min(length, begin + chunk) - begin];
}

// The slice of a tensor that a rank at a coordinate (one index an axis) holds, as [start, length] of each dim.
function sliceAt(shape, types, layout, coordinate, isStored) {
  const found = shape.map((length) => [0, length]);
  types.forEach((type, axis) => {
    if (type.kind !== 'S') return;
    const cut = isStored ? { ...layout[axis], shares: [] } : layout[axis];
    found[type.dim] = part(found[type.dim], cut, coordinate[axis]);
  });
  return found;
}
