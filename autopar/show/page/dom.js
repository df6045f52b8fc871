// Elements made from data. Text is set as text and never parsed: names in a plan are not ours.

const SVG = 'http://www.w3.org/2000/svg';

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// `on…` are listeners, `style` an object of properties; null and false leave an attribute out.
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'style') for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// A table of texts or elements; columns whose heading ends with "#" hold numbers.
function table(headings, rows, attributes = {}) {
  const number = headings.map((heading) => heading.endsWith('#'));
  const cell = (tag, content, column) =>
    el(tag, { class: number[column] && 'number', scope: tag === 'th' && 'col' }, content);
  return el(
    'div',
    { class: 'scroll' },
    el(
      'table',
      attributes,
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          headings.map((heading, column) => cell('th', heading.replace(/#$/, ''), column)),
        ),
      ),
      el(
        'tbody',
        {},
        rows.map((row) =>
          el(
            'tr',
            {},
            row.map((content, column) => cell('td', content, column)),
          ),
        ),
      ),
    ),
  );
}

// Colours as the current theme has them, for canvases.
const probe = el('span', { hidden: true });
let known = {};

function colour(name) {
  if (!known[name]) {
    probe.style.color = `var(--${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  return known[name];
}

function forgetColours() {
  known = {};
}
