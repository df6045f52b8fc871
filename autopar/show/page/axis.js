// What views over the time of a step share: the canvas, its scale of time at the top, and what is told of a point.

const GUTTER = 132;
const RULER = 22;
const TIP_WIDTH = 300;

class OverTime {
  constructor(plan, state, actions) {
    Object.assign(this, { plan, state, actions });
  }

  // Makes the canvas, of so many pixels' height. A view has `paint` and `point` of its own.
  mount(height, attributes) {
    this.height = height;
    this.tip = el('div', { class: 'tip', role: 'status', hidden: true });
    this.canvas = el('canvas', {
      onpointermove: (event) => this.point(event),
      onpointerleave: () => {
        this.tip.hidden = true;
      },
      ...attributes,
    });
    this.canvas.style.height = `${height}px`;
    this.element = el('div', { class: 'canvas' }, this.canvas, this.tip);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // The window in time, which all views share.
  get range() {
    return this.state.range;
  }

  get nsPerPixel() {
    return (this.range[1] - this.range[0]) / (this.width - GUTTER);
  }

  x(ns) {
    return GUTTER + (ns - this.range[0]) / this.nsPerPixel;
  }

  ns(x) {
    return this.range[0] + (x - GUTTER) * this.nsPerPixel;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const context = this.canvas.getContext('2d');
    context.scale(ratio, ratio);
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    ruler(context, this, this.height);
    this.paint(context);
  }

  // Paints right of the labels, from `top` down.
  clipped(context, top, paint) {
    context.save();
    context.beginPath();
    context.rect(GUTTER, top, this.width - GUTTER, this.height - top);
    context.clip();
    paint();
    context.restore();
  }

  // Where the event is, from the canvas's left and top.
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // Beside the point, on the side where there is room.
  showTip(x, top, ...children) {
    const away = TIP_WIDTH + 16;
    this.tip.replaceChildren(...children);
    this.tip.style.left = `${x + away > this.width ? Math.max(0, x - away) : x + 16}px`;
    this.tip.style.top = `${top}px`;
  }
}

// The scale at the top, with lines through all rows at round times.
function ruler(context, view, height) {
  const length = view.range[1] - view.range[0];
  const rough = length / Math.max(2, (view.width - GUTTER) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  context.textAlign = 'left';
  for (let ns = Math.ceil(Math.max(0, view.range[0]) / step) * step; ns <= view.range[1]; ns += step) {
    const x = view.x(ns);
    context.fillStyle = colour('edge');
    context.fillRect(x, 0, 1, height);
    context.fillStyle = colour('faint');
    if (x + 50 < view.width) context.fillText(scaleText(ns, step), x + 4, RULER / 2 - 2);
  }
}

// A time in the unit of the steps between lines, with the digits that tell neighbours apart.
function scaleText(ns, step) {
  const [unit, factor] = [
    ['s', 1e9],
    ['ms', 1e6],
    ['µs', 1e3],
    ['ns', 1],
  ].find(([, size]) => step >= size / 10 || size === 1);
  const digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  const exact = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return `${(ns / factor).toLocaleString('en-US', exact)} ${unit}`;
}
