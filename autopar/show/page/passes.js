// A simulated step as it is drawn from: passes, their tasks by stream, and what of them a pixel holds.

function kindColour(kind) {
  if (kind.startsWith('forward')) return 'forward';
  if (kind.startsWith('backward weight') || kind === 'backward_weight') return 'weight';
  if (kind.startsWith('backward')) return 'backward';
  const known = ['recompute', 'optimizer', 'activation', 'parameter', 'gradient', 'operator', 'send'];
  return known.find((name) => kind.startsWith(name)) || 'quiet';
}

// The lists as they are drawn from: absolute starts, tasks by stream, lanes with their rows.
function decoded(picture) {
  const passes = picture.passes.map(([streams, names, added, lengths, kinds]) => {
    let start = 0;
    const rows = new Map();
    streams.forEach((stream, number) => {
      start += added[number];
      if (!rows.has(stream))
        rows.set(stream, { starts: [], ends: [], names: [], kinds: [], latest: 0, bins: new Map() });
      const row = rows.get(stream);
      row.starts.push(start);
      row.ends.push(start + lengths[number]);
      row.names.push(names[number]);
      row.kinds.push(kinds[number]);
      row.latest = Math.max(row.latest, start + lengths[number]);
    });
    return rows;
  });
  const lanes = picture.lanes.map((lane) => {
    const [added, numbers, labels] = lane.passes;
    let begin = 0;
    const placed = added.map((more, at) => ({ begin: (begin += more), rows: passes[numbers[at]], label: labels[at] }));
    const streams = [...new Set(placed.flatMap((one) => [...one.rows.keys()]))];
    streams.sort((a, b) => (picture.streams[a] === 'compute' ? -1 : picture.streams[b] === 'compute' ? 1 : a - b));
    return streams.map((stream) => {
      const own = placed
        .filter((one) => one.rows.has(stream))
        .map((one) => ({ begin: one.begin, label: one.label, tasks: one.rows.get(stream) }));
      return { name: picture.streams[stream], placed: own, longest: Math.max(...own.map((one) => one.tasks.latest)) };
    });
  });
  return lanes;
}

// The position of the first item of which the key is above the value.
function above(items, value, key = (item) => item) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Of a pass's stream: nanoseconds of each kind in bins of a power of two, made when they are first asked for.
function binned(tasks, nsPerPixel, numKinds) {
  const level = Math.max(0, Math.floor(Math.log2(nsPerPixel)));
  if (!tasks.bins.has(level)) {
    const width = 2 ** level;
    const first = Math.floor(tasks.starts[0] / width);
    const bins = new Float64Array((Math.floor(tasks.latest / width) - first + 1) * numKinds);
    tasks.starts.forEach((start, number) =>
      spread(start, tasks.ends[number], width, (bin, ns) => {
        bins[(bin - first) * numKinds + tasks.kinds[number]] += ns;
      }),
    );
    tasks.bins.set(level, { width, first, bins });
  }
  return tasks.bins.get(level);
}

// Shares an interval out over bins.
function spread(start, end, width, take) {
  for (let bin = Math.floor(start / width), at = start; at < end; bin += 1) {
    const stop = Math.min(end, (bin + 1) * width);
    take(bin, stop - at);
    at = stop;
  }
}
