// Numbers for people: three digits with a unit, as `print(plan)` writes them.

function scaled(number, units) {
  const size = Math.abs(number);
  const [unit, factor] = units.find(([, least]) => size >= least) || units[units.length - 1];
  const value = number / factor;
  return `${size >= 1000 * units[0][1] ? Math.round(value) : Number(value.toPrecision(3))} ${unit}`;
}

const time = (ns) =>
  scaled(ns, [
    ['s', 1e9],
    ['ms', 1e6],
    ['µs', 1e3],
    ['ns', 1],
  ]);
const bytes = (count) =>
  scaled(count, [
    ['TB', 1e12],
    ['GB', 1e9],
    ['MB', 1e6],
    ['kB', 1e3],
    ['B', 1],
  ]);
const grouped = (number) => Math.round(number).toLocaleString('en-US');
const percent = (part, whole) =>
  !whole
    ? '–'
    : part && part * 1000 < whole
      ? '< 0.1 %'
      : `${Number(((100 * part) / whole).toPrecision(part * 10 < whole ? 2 : 3))} %`;
const signed = (number, format) => `${number < 0 ? '−' : '+'}${format(Math.abs(number))}`;
const change = (before, after) =>
  signed((100 * (after - before)) / before, (share) => `${Number(share.toPrecision(3))} %`);
const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? '' : 's'}`;
const words = (name) =>
  name
    .replace(/_time_ns$|_ns$/, ' time')
    .replace(/_bytes$/, ' memory')
    .replaceAll('_', ' ');
const ranksText = ([first, last]) =>
  first === last ? `rank\u00a0${first}` : `ranks\u00a0${grouped(first)}–${grouped(last)}`;

// A value of a search's row, by what its name says of its unit.
function valueText(name, value) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number') return typeof value === 'object' ? JSON.stringify(value) : String(value);
  if (name.endsWith('_ns')) return time(value);
  if (name.endsWith('_bytes')) return bytes(value);
  return Number.isInteger(value) ? grouped(value) : String(Number(value.toPrecision(3)));
}

const axisText = (axis) => `${axis.name}=${grouped(axis.size)}`;
const meshText = (layout) => layout.map(axisText).join('\u00a0×\u00a0') || 'one device';
const isMicrobatch = (axis) => axis.name === 'microbatch';

function linkText(axis) {
  if (axis.near === axis.size) return 'inside a node';
  return axis.near > 1 ? `across nodes, ${axis.near} ranks in each` : 'across nodes';
}
