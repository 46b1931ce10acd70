// What a rank holds in a step, as simulator/memory counts it, of models without experts and plans of one stage: states
// and their shards, buckets or units on their way, activations, and what lives for less than a pass.

const KINDS = ["parameters", "gradients", "optimizer state", "master weights", "activations", "logits", "buffers", "temporary"];
const KIND_COLOURS = ["#0072B2", "#E69F00", "#CC79A7", "#882255", "#009E73", "#88CCEE", "#F0E442", "#999999"];
const POWERS = (most) => range(Math.log2(most) + 1, (power) => 2 ** power);

// Sizes of the buckets into which parameters go from the last to the first; a larger one than the bucket goes alone.
function bucketsOf(sizes, most, first = most) {
  const buckets = [[]];
  let held = 0;
  sizes.map((size, at) => [size, at]).reverse().forEach(([size, at]) => {
    if (size > most && buckets[buckets.length - 1].length) [held] = [0, buckets.push([])];
    buckets[buckets.length - 1].push(at);
    held += size;
    if (held >= (buckets.length > 1 ? most : first)) [held] = [0, buckets.push([])];
  });
  return buckets.filter((bucket) => bucket.length).map((parameters) => ({ parameters, bytes: sum(parameters.map((at) => sizes[at])) }));
}

// Bytes of buckets that travel when so many bytes of gradients exist: the last full one, and the one before it while
// the next has nothing yet.
function underWay(buckets, passed) {
  const ends = sumsOf(buckets), full = ends.findLastIndex((end) => end <= passed);
  return (full ? buckets[full - 1] : 0) + (full > 1 && ends[full] === passed ? buckets[full - 2] : 0);
}

PLAYERS.memory = {
  begin: { model: "llama-2-70b", device: "h100-sxm", ranks: 32, stage: 3, recompute: "full", microbatch: 1, tensor: 1,
    precision: "bfloat16, float32 master weights (16)" },
  controls: (data) => [
    ["model", "model", Object.keys(data.models), Object.keys(data.models)], ["device", "device", Object.keys(data.devices), Object.keys(data.devices)], ["ranks", "data-parallel ranks", POWERS(1024)],
    ["stage", "sharding", [0, 1, 2, 3], ["none", "ZeRO-1: optimizer", "ZeRO-2: + gradients", "ZeRO-3: + parameters"]],
    ["recompute", "recompute", ["none", "selective", "operators", "full"], String], ["precision", "precision", Object.keys(data.precisions), Object.keys(data.precisions)],
    ["microbatch", "micro-batch size", POWERS(32)], ["tensor", "tensor-parallel ranks", POWERS(8)],
  ],

  state(data, { model, device, ranks: n, stage, recompute, precision, microbatch, tensor: t }) {
    const width = data.precisions[precision], batch = (width.activations * microbatch) / t;
    const layers = data.models[model], last = layers.length - 1;
    const sizes = layers.map((each) => each.num_parameters - each.tensor_parameters + Math.ceil(each.tensor_parameters / t));
    const largest = layers.map((each, at) => Math.min(each.largest_parameter, sizes[at])), whole = sum(sizes);
    const logits = layers.map((each) => (each.logits_bytes * microbatch) / t), all = layers.map((each) => batch * (each.activation_bytes - each.logits_bytes));
    const kept = layers.map((each, at) => {
      const [inputs, some] = [batch * each.input_bytes, batch * (each.input_bytes + each.operator_bytes)];
      if (recompute === "full" && inputs) return Math.min(inputs, all[at]);
      if (recompute === "operators" && each.operator_bytes) return Math.min(some, all[at]);
      const scores = recompute === "selective" ? batch * each.score_bytes : 0;
      return all[at] - (each.tensor_activation_bytes >= each.score_bytes ? scores : scores * t);
    });
    const up = (values) => values.map(Math.ceil), zero = layers.map(() => 0), again = all.map((each, at) => each - kept[at]);
    const outputs = layers.map((each) => batch * each.output_bytes), widest = layers.map((each) => batch * each.widest_bytes);
    const gathered = layers.map((each, at) => Math.max(at ? outputs[at - 1] : 0, batch * each.input_bytes) * (t - 1));
    const working = [outputs.map((each, at) => gathered[at] + each + (recompute === "selective" ? again[at] : Math.min(again[at], 2 * widest[at]))),
      outputs.map((each, at) => 2 * gathered[at] + again[at] + each + Math.max(at ? outputs[at - 1] : 0, widest[at], 2 * logits[at]))];
    let buffers = [zero, zero], ends = 0, grown = [...zero, 0], steady = 0, shard = Math.ceil(whole / n);
    const backTo = (values, from) => sum(values.slice(from)), inBuckets = n > 1 && stage < 3;
    if (stage === 3) { // units: a block each, and the root, which holds the rest
      const padded = (each) => Math.ceil(each / n) * n, units = layers.map((each, at) => (each.input_bytes ? padded(sizes[at]) : 0));
      const root = padded(sum(sizes.filter((_, at) => !layers[at].input_bytes))), blocks = units.filter(Boolean), upTo = sumsOf(blocks);
      const begun = units.map((_, at) => units.slice(0, at + 1).filter(Boolean).length), own = units.map((size) => (size ? 1 : 0));
      const ahead = begun.map((each) => Math.min(each + 1, blocks.length)), behind = begun.map((each, at) => Math.max(each - 1 - own[at], 0));
      const travels = [...blocks, 0].map((size) => size * (1 + (n - 1) / n) * width.reduce);
      buffers = [ahead.map((each, at) => (root + upTo[each] - upTo[begun[at] - own[at]]) * width.parameter),
        begun.map((each, at) => (root + upTo[each] - upTo[behind[at]]) * width.parameter + travels[each])];
      working[1] = working[1].map((each, at) => each + (root + (own[at] ? largest[at] : 0)) * width.parameter);
      shard = (root + upTo[blocks.length]) / n;
      grown = [...begun.map((each) => (backTo(blocks, each + 1) / n) * width.gradient), shard * width.gradient];
      ends = begun.includes(blocks.length) ? (root || blocks[0]) * (1 + (n - 1) / n) * width.reduce : 0;
    } else {
      working[1] = working[1].map((each, at) => each + largest[at] * width.parameter);
      if (!inBuckets) grown = [...range(last + 1, (at) => backTo(sizes, at + 1)), whole].map((each) => (each / whole) * (whole * width.gradient));
      const buckets = inBuckets ? bucketsOf(layers.flatMap((each) => each.sizes.map((size) => size * width.gradient)), 25e6).map((each) => each.bytes) : [0];
      const two = (buckets.length < 2 ? buckets[0] : 2 * Math.max(...buckets)) / t, wider = stage < 2 && width.reduce !== width.gradient;
      const counts = layers.map((each) => each.num_parameters), extra = inBuckets && wider ? (two * width.reduce) / width.gradient : 0;
      const arriving = [...range(last + 1, (at) => backTo(counts, at + 1)), sum(counts)].map((passed) =>
        extra + (inBuckets && stage ? (underWay(buckets, passed * width.gradient) / t) * ((n - 1) / n) : 0));
      [buffers, ends, steady] = [[zero, arriving.slice(0, -1)], arriving[last + 1], stage === 2 ? two : 0];
    }
    const gradients = (stage > 1 ? shard : whole) * width.gradient, mine = stage ? shard : whole;
    const always = up([(stage === 3 ? shard : whole) * width.parameter, inBuckets ? gradients : 0, mine * width.optimizer, mine * width.master, 0, 0, steady, 0]);
    const held = [kept, logits].map((values) => sumsOf(up(values)).slice(1)), rows = [], times = [];
    const row = (time, ...added) => { times.push(time); rows.push(KINDS.map((_, kind) => always[kind] + Math.ceil(added[kind] ?? 0))); };
    const passing = (time, at, turn, gradients, more) =>
      row(time, 0, gradients, 0, 0, held[0][at], held[1][at] + Math.ceil(more), buffers[turn][at], working[turn][at]);
    const count = layers.length, master = width.master || width.parameter;
    for (let at = 0; at < count; at++) passing(at, at, 0, 0, logits[at]);
    row(count, 0, 0, 0, 0, held[0][last], held[1][last]);
    for (let at = last; at >= 0; at--) passing(count + 2 * (last - at), at, 1, grown[at], 0);
    row(3 * count, 0, grown[count], 0, 0, 0, 0, ends);
    const update = 2 * Math.min(master * Math.max(...largest), (mine * width.optimizer) / 2);
    row(3 * count, 0, grown[count], 0, 0, 0, 0, 0, update);
    row(4 * count, 0, grown[count]);
    const peak = rows.reduce((most, each) => (sum(each) > sum(most) ? each : most));
    const moments = new Map(); // of one moment, the most of each kind
    rows.forEach((each, at) => moments.set(times[at], each.map((bytes, kind) => Math.max(bytes, moments.get(times[at])?.[kind] ?? 0))));
    return { rows: [...moments.values()], times: [...moments.keys()], peak, capacity: data.devices[device] };
  },

  say({ rows, peak, capacity }) {
    const bytes = sum(peak), share = bytes / capacity, most = Math.max(...peak);
    const order = range(KINDS.length).sort((a, b) => peak[b] - peak[a] || a - b).filter((kind) => peak[kind]);
    const takeaway = `A rank peaks at ${bytesOf(bytes)}, ${percent(most / bytes)} of it ${KINDS[order[0]]}`;
    const note = `${percent(share, share < 0.1 ? 1 : 0)} of the device's ${bytesOf(capacity)}`;
    const held = order.map((kind) => `${KINDS[kind]} ${bytesOf(peak[kind])}`).join(", "), least = Math.min(...rows.map(sum));
    return [bytes > capacity ? `Does not fit: a rank needs ${bytesOf(bytes)}` : takeaway,
      `Memory: Each rank peaks at ${bytesOf(bytes)}: ${held}. Between the peaks it falls to ${bytesOf(least)}. ${note}.`];
  },

  draw(pen, { rows, times, peak, capacity }) {
    const most = Math.max(sum(peak), capacity <= 1.6 * sum(peak) ? capacity : 0) * 1.04, wide = pen.wide - 2, tall = 200, top = 56, end = times[times.length - 1];
    const ends = sumsOf(peak.map((bytes) => (bytes / most) * wide));
    pen.words(0, 14, `at the peak: ${bytesOf(sum(peak))}`, { bold: true });
    KINDS.forEach((words, kind) => pen.box(ends[kind], 20, ends[kind + 1] - ends[kind], 26, KIND_COLOURS[kind], [words, words[0].toUpperCase()]));
    pen.words(0, top + 18, "over the step: forward, backward, update", { bold: true });
    const below = rows.map(() => 0), y = (bytes) => top + 26 + tall * (1 - bytes / most), at = (place) => (times[place] / end) * wide;
    KIND_COLOURS.forEach((colour, kind) => {
      const edge = (values) => rows.flatMap((_, place) => [[at(place), y(values[place])], [at(Math.min(place + 1, rows.length - 1)), y(values[place])]]);
      const low = edge(below);
      rows.forEach((each, place) => { below[place] += each[kind]; });
      pen.path([...edge(below), ...low.reverse()], "none", { style: `fill:${colour}` });
    });
    if (capacity <= most) for (const line of [[[(capacity / most) * wide, 18], [(capacity / most) * wide, 48]], [[0, y(capacity)], [wide, y(capacity)]]]) pen.path(line, "currentColor", { "stroke-dasharray": "5 4" });
    pen.legend(KINDS.flatMap((words, kind) => (rows.some((each) => each[kind]) ? [[KIND_COLOURS[kind], words]] : [])));
  },
};
