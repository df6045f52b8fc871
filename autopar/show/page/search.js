// Substitutions, and how the plan was found.

function substitutions(plan) {
  return el('div', {}, rewrites(plan), plan.search.rewriting ? graphs(plan.search.rewriting) : null);
}

// The graphs that were planned, the model's own first, and why each was not taken.
function graphs(found) {
  const most = Math.max(...found.graphs.map((graph) => graph.step_time_ns || 0), 1);
  const rows = found.graphs.map((graph) => [
    Object.entries(graph.rules)
      .map(([rule, count]) => (count > 1 ? `${rule} ×${grouped(count)}` : rule))
      .join(', ') || 'the graph as it is',
    time(graph.one_device_ns),
    `${graph.mesh}${graph.stages > 1 ? `, ${graph.stages} stages` : ''}` +
      `${graph.microbatches > 1 ? `, ${graph.microbatches} microbatches` : ''}`,
    graph.step_time_ns === null
      ? '–'
      : meter(graph.step_time_ns, most, graph.outcome === 'taken' ? 'compute' : 'quiet', time(graph.step_time_ns)),
    graph.outcome,
  ]);
  return el(
    'div',
    { class: 'graphs' },
    el('h3', {}, `Equal graphs that were planned (${grouped(found.graphs.length)})`),
    el(
      'p',
      {},
      `Substitutions led to ${plural(found.seen, 'graph')}; stopped: ${found.stop_reason}. ` +
        `Finding and planning them took ${seconds(found)}.`,
    ),
    table(['graph', 'on one device#', 'planned on', 'a step', ''], rows),
  );
}

function rewrites(plan) {
  if (!plan.substitutions.length)
    return el('p', {}, "The model's graph is planned as it was traced: nothing in it was rewritten.");
  const rows = plan.substitutions.map((step) => [
    el('span', {}, el('b', {}, step.rule), el('br'), el('code', {}, step.statement)),
    step.status,
    moduleList(step.modules),
    step.roots.join(', '),
    step.gain_ns ? signed(-step.gain_ns, time) : '–',
  ]);
  const gain = plan.substitutions.reduce((sum, step) => sum + step.gain_ns, 0);
  return el(
    'div',
    {},
    el(
      'p',
      {},
      `${plural(plan.substitutions.length, 'rewrite')} of the graph into an equal one, before anything was placed: ` +
        `${time(gain)} less a step on one device.`,
    ),
    table(['rule', 'status', 'in modules', 'computes anew', 'on one device#'], rows),
  );
}

const seconds = (found) => `${Number(found.seconds.toPrecision(2))} s of work`;

function moduleList(modules) {
  const named = modules.filter(Boolean);
  if (named.length < 4) return named.join(', ') || '(root)';
  return `${named[0]} … ${named[named.length - 1]} (${named.length})`;
}

function search(plan) {
  const found = plan.search;
  const gap = found.lower_bound_ns && found.cost_ns ? (found.cost_ns - found.lower_bound_ns) / found.cost_ns : null;
  return el(
    'div',
    {},
    el(
      'p',
      {},
      `${found.method || 'given'}${found.stop_reason ? `; stopped: ${found.stop_reason}` : ''}`,
      found.seconds ? ` after ${seconds(found)}. ` : '. ',
      found.cost_ns
        ? `Estimated cost ${time(found.cost_ns)}, ` +
            `lower bound of the problem that was solved ${time(found.lower_bound_ns)}`
        : '',
      gap === null ? '' : gap > 0 ? `: at most ${percent(gap, 1)} above the best.` : ': nothing cheaper exists in it.',
    ),
    found.tried.length ? [el('h3', {}, `What was tried (${grouped(found.tried.length)})`), tried(plan)] : null,
    found.refinement ? refinement(found.refinement) : null,
  );
}

// The settings that were looked at, the fastest first; one row is the plan.
function tried(plan) {
  const rows = plan.search.tried;
  const refined = plan.search.refinement;
  const names = [...new Set(rows.flatMap(Object.keys))].filter(
    (name) => rows.some((row) => row[name] !== rows[0][name]) || name === 'mesh' || name === 'step_time_ns',
  );
  const key = names.find((name) => name === 'step_time_ns') || names.find((name) => name.endsWith('_ns'));
  const ordered = [...rows].sort((a, b) => (a[key] ?? Infinity) - (b[key] ?? Infinity));
  const most = Math.max(...rows.map((row) => row[key] || 0), 1);
  return table(
    names.map((name) => words(name) + (name !== key && rows.some((row) => typeof row[name] === 'number') ? '#' : '')),
    ordered.map((row) =>
      names.map((name) => {
        const text = valueText(name, row[name]);
        if (name !== key || !row[name]) return text;
        const chosen = row[name] === (refined ? refined.before_ns : plan.predicted.step_time_ns);
        const label = refined && refined.after_ns !== refined.before_ns ? 'refined' : 'the plan';
        return meter(row[name], most, chosen ? 'compute' : 'quiet', chosen ? `${text}, ${label}` : text);
      }),
    ),
  );
}

function refinement(found) {
  if (!found.proposals) {
    return el('p', { class: 'refinement' }, `Not refined by a random walk (MCMC): ${found.stop_reason}.`);
  }
  const rates = Object.entries(found.rates).map(([kind, [made, accepted]]) => [
    words(kind),
    grouped(made),
    grouped(accepted),
    meter(accepted, Math.max(made, 1), 'compute', percent(accepted, made)),
  ]);
  const starts = Object.entries(found.starts)
    .sort((a, b) => a[1][1] - b[1][1])
    .map(([name, [begin, end]]) => [
      name === found.start ? el('b', {}, `${name} (kept)`) : name,
      time(begin),
      time(end),
      signed(end - begin, time),
    ]);
  const moves = found.moves.map((move) => [
    el('code', {}, move.name),
    move.count > 1 ? `×${grouped(move.count)}` : '',
    words(move.kind),
    move.before,
    move.after,
    signed(-move.gain_ns, time),
  ]);
  return el(
    'div',
    { class: 'refinement' },
    el('h3', {}, 'Refined by a random walk (MCMC)'),
    el(
      'p',
      {},
      `${gained(found)}: ` +
        `${plural(found.proposals, 'proposal')}, of which ${grouped(found.simulated)} were simulated, ` +
        `in ${seconds(found)}; stopped: ${found.stop_reason}; seed ${found.seed}.`,
    ),
    found.trace.length > 1 ? curve(found.trace) : null,
    rates.length ? [el('h4', {}, 'Proposals by kind'), table(['kind', 'made#', 'accepted#', 'rate'], rates)] : null,
    starts.length ? [el('h4', {}, 'Starts'), table(['from', 'began at#', 'ended at#', 'change#'], starts)] : null,
    moves.length
      ? [
          el('h4', {}, 'Moves that are in the plan, and what each saves'),
          table(['what', '', 'kind', 'before', 'after', 'saves#'], moves),
        ]
      : null,
  );
}

function gained(found) {
  const { before_ns: before, after_ns: after } = found;
  if (before === after) return `Nothing was found that is faster than ${time(before)}`;
  return `${time(before)} became ${time(after)} (${change(before, after)})`;
}

// Step time over proposals: the chain's current state, and the best so far.
function curve(trace) {
  const [width, height, left, bottom, top] = [720, 220, 64, 28, 10];
  const last = trace[trace.length - 1][0] || 1;
  const times = trace.flatMap((point) => [point[1], point[2]]);
  const [low, high] = [Math.min(...times), Math.max(...times)];
  const x = (proposal) => left + ((width - left - 8) * proposal) / last;
  const y = (ns) => height - bottom - ((height - bottom - top) * (ns - low)) / Math.max(1, high - low);
  const line = (column) => trace.map((point) => `${x(point[0]).toFixed(1)},${y(point[column]).toFixed(1)}`).join(' ');
  return el(
    'figure',
    {},
    svg(
      'svg',
      {
        viewBox: `0 0 ${width} ${height}`,
        class: 'curve',
        role: 'img',
        'aria-label': `step time from ${time(trace[0][1])} to ${time(trace.at(-1)[2])} over ${grouped(last)} proposals`,
      },
      [low, (low + high) / 2, high].map((ns) => [
        svg('line', { class: 'rule', x1: left, x2: width - 8, y1: y(ns), y2: y(ns) }),
        svg('text', { x: left - 6, y: y(ns) + 4, 'text-anchor': 'end' }, time(ns)),
      ]),
      [0, 0.5, 1].map((share) =>
        svg(
          'text',
          { x: x(share * last), y: height - 8, 'text-anchor': share === 1 ? 'end' : share ? 'middle' : 'start' },
          grouped(share * last),
        ),
      ),
      svg('polyline', { class: 'current', points: line(1) }),
      svg('polyline', { class: 'best', points: line(2) }),
    ),
    el(
      'figcaption',
      { class: 'note' },
      'Step time over proposals: ',
      el('span', { class: 'line current' }),
      ' current, ',
      el('span', { class: 'line best' }),
      ' best so far.',
    ),
  );
}

function provenance(plan) {
  const replicated = Object.entries(plan.coverage).filter(([, source]) => source.startsWith('replicated'));
  return el(
    'div',
    {},
    el(
      'p',
      {},
      replicated.length
        ? `Operators without a sharding rule, which run replicated: ${replicated.map(([name]) => name).join(', ')}.`
        : `All ${plural(Object.keys(plan.coverage).length, 'kind')} of operators have sharding rules.`,
    ),
    Object.keys(plan.sources).length
      ? table(['figures of the cost profile', 'from'], Object.entries(plan.sources))
      : null,
    el(
      'details',
      {},
      el('summary', {}, "Where each operator's rule comes from"),
      table(['operator', 'rule'], Object.entries(plan.coverage)),
    ),
    el('p', { class: 'note' }, `fingerprint of the model's graph: ${plan.fingerprint}`),
  );
}
