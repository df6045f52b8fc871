// A traced run beside the simulated step: what was wrong, and where in the model.

const LINES_AT_FIRST = 40;

function observedStep(plan) {
  const found = data.observed;
  if (plan !== data.plans[0]) return el('p', {}, 'What ran is the first plan.');
  const [first, count] = found.ranks;
  return el(
    'div',
    {},
    el(
      'p',
      {},
      `${ranksText([first, first + count - 1])}, ${plural(found.steps, 'traced step')} on ${found.device}: `,
      el('b', {}, `${time(found.predicted_ns)} predicted, ${time(found.measured_ns)} measured`),
      ` (${change(found.measured_ns, found.predicted_ns)}), ${time(found.busy_ns)} of a processor.`,
    ),
    el('h3', {}, 'What was wrong'),
    table(
      ['', 'predicted#', 'measured#', 'difference#', ''],
      found.causes.map(([name, predicted, measured, about]) => [
        name,
        time(predicted),
        time(measured),
        signed(measured - predicted, time),
        about,
      ]),
      { class: 'causes' },
    ),
    el('h3', {}, 'By line of the model'),
    lineTable(found.lines.slice(0, LINES_AT_FIRST)),
    found.lines.length > LINES_AT_FIRST
      ? el(
          'details',
          {},
          el('summary', {}, `${plural(found.lines.length - LINES_AT_FIRST, 'line')} more`),
          lineTable(found.lines.slice(LINES_AT_FIRST)),
        )
      : null,
    found.unseen.length
      ? el('p', { class: 'note' }, `Simulated and in no trace: ${found.unseen.join(', ')}.`)
      : null,
  );
}

function lineTable(lines) {
  const most = Math.max(...data.observed.lines.map(([, , , predicted, measured]) => Math.max(predicted, measured)), 1);
  return table(
    ['module', 'line', 'predicted', 'measured', 'difference#', 'statements'],
    lines.map(([module, source, statements, predicted, measured]) => [
      el('code', {}, module || '(model)'),
      el('code', {}, source),
      meter(predicted, most, 'quiet', time(predicted)),
      meter(measured, most, 'compute', time(measured)),
      signed(measured - predicted, time),
      statements.join(', '),
    ]),
    { class: 'lines' },
  );
}
