// One step of data parallelism at one moment, as simulator/step times it on ranks that are alike, and as train_step.py
// tells it: when gradients are made, when each all-reduce is on the wire, what of it backward hides.

const SYNCS = ["overlapped", "bucketed", "flat", "per_parameter"];

// The all-reduces of a step, in the order in which they leave: bytes, the layer that makes the last gradient, their copies.
function reductionsOf(sync, layers, { bucket, ranks: n, link, memory }) {
  const sizes = layers.flatMap((layer) => layer.sizes), owner = layers.flatMap((layer, at) => layer.sizes.map(() => at));
  const groups = { per_parameter: sizes.map((bytes, at) => ({ parameters: [at], bytes })), flat: [{ parameters: range(sizes.length), bytes: sum(sizes) }] }[sync] ?? bucketsOf(sizes, bucket, sync === "overlapped" ? 1e6 : bucket);
  const copies = ["flat", "bucketed"].includes(sync) ? [4, 2] : [2, 0], factor = (2 * (n - 1) + link.idle_steps) / n;
  return groups.map(({ parameters, bytes }, at) => ({
    name: sync === "flat" ? "all gradients" : `${sync === "per_parameter" ? "parameter" : "bucket"} ${at}`, bytes,
    layer: Math.min(owner[parameters[0]], owner[parameters[parameters.length - 1]]),
    pack: even((copies[0] * bytes * 1e9) / memory), unpack: even((copies[1] * bytes * 1e9) / memory),
    lasts: even(1e9 * (link.start_s + messagesS(bytes, 2 * (n - 1), factor * bytes, link))),
  }));
}

// When everything begins and ends, in nanoseconds: one compute lane, one wire, each in the order of the program.
function timesOf(sync, layers, reductions, update) {
  let now = sum(layers.map(({ forward }) => forward)), wire = 0, next = 0;
  const begin = now, sent = [];
  const send = (each) => {
    wire = Math.max(wire, (now += each.pack)) + each.lasts;
    sent.push({ ...each, start: wire - each.lasts, end: wire });
  };
  for (let layer = layers.length - 1; layer >= 0; layer--) {
    now += layers[layer].backward;
    while (sync === "overlapped" && next < reductions.length && reductions[next].layer >= layer) send(reductions[next++]);
  }
  const end = now;
  for (const each of reductions.slice(next)) {
    send(each);
    if (sync === "per_parameter") now = wire + each.unpack;
  }
  if (sync !== "per_parameter") for (const each of sent) now = Math.max(now, each.end) + each.unpack;
  return { begin, end, sent, update: now, done: now + update };
}

// When the gradients of each all-reduce are all there: in proportion, or where it starts under backward, then.
function addReady({ begin, end, sent }, sync) {
  const last = sync === "per_parameter", shares = sumsOf((last ? [...sent].reverse() : sent).map(({ bytes }) => Math.max(1, bytes))).slice(1);
  const ready = (last ? shares.reverse() : shares).map((share) => begin + (share / Math.max(...shares)) * (end - begin));
  sent.forEach(({ start }, at) => {
    if (start < end) ready[at] = at && start - sent[at - 1].end < 2000 ? Math.min(start, ready[at]) : start;
    else if (at && !last) ready[at] = Math.min(end, Math.max(ready[at], ready[at - 1]));
  });
  range(sent.length).sort((a, b) => ready[a] - ready[b] || a - b).forEach((at, place, order) => Object.assign(sent[at], { ready: ready[at], fill: place ? ready[order[place - 1]] : begin }));
}

function heldAt({ start, end, ready, fill }, at) {
  if (at >= end) return ["mean", 1];
  if (at >= start) return ["sent", (at - start) / (end - start)];
  if (at >= ready) return ["own", 1];
  return at > fill ? ["filling", (at - fill) / (ready - fill)] : ["absent", 0];
}

PLAYERS.step = {
  begin: { sync: "overlapped", ranks: 8, link: "infiniband-hdr", bucket: 25e6, samples: "4", moment: 0.5 },
  controls: (data, values) => [
    ["sync", "gradients", SYNCS, SYNCS.map((name) => name.replace("_", " "))], ["ranks", "GPUs", [2, 4, 8, 16, 32, 64]],
    ["link", "wire of each GPU", Object.keys(data.links), Object.keys(data.links)], ["bucket", "bucket", [1e6, 2e6, 5e6, 10e6, 25e6, 50e6, 100e6], bytesOf],
    ["samples", "samples on each GPU", Object.keys(data.models), Object.keys(data.models)], ["moment", "moment", range(201, (place) => place / 200), (share) => secondsOf((share * (values.duration ?? 0)) / 1e9)],
  ],

  state(data, values) {
    const { sync, ranks, samples, bucket, moment } = values, { layers: rows, update } = data.models[samples];
    const layers = rows.map(([forward, backward, gradients]) => ({ forward, backward, sizes: gradients }));
    const step = timesOf(sync, layers, reductionsOf(sync, layers, { bucket, ranks, link: data.links[values.link], memory: data.memory }), update);
    addReady(step, sync);
    values.duration = step.done;
    const at = moment * step.done, share = (from, to) => Math.min(Math.max((at - from) / (to - from), 0), 1);
    const [forward, backward] = [share(0, step.begin), share(step.begin, step.end)], active = step.sent.find(({ start, end }) => start <= at && at < end);
    const doing = at < step.begin ? `forward ${percent(forward)}` : at < step.end ? `backward ${percent(backward)}`
      : at >= step.done ? "step done" : at >= step.update ? "updates weights" : active ? `waits for ${active.name}` : "waits";
    const hidden = sum(step.sent.map(({ start, end }) => Math.max(0, Math.min(end, step.end) - start))), moved = sum(step.sent.map(({ lasts }) => lasts));
    return { ...step, at, ranks, doing, kept: Math.max(0, forward - backward), updated: at >= step.done, hidden, exposed: moved - hidden,
      held: step.sent.map((each) => heldAt(each, at)) };
  },

  say({ at, done, sent, held, doing, kept, updated, hidden, exposed }) {
    const states = held.map(([state]) => state), under = sent.filter((_, place) => states[place] === "sent"), when = `At ${secondsOf(at / 1e9)}`;
    const number = (state) => states.filter((one) => one === state).length, now = doing === "step done" ? "the step is done" : `rank 0: ${doing}`;
    const words = { mean: "averaged", sent: "being averaged", own: "its own, ready", filling: "being made", absent: "not there yet" };
    const counts = Object.keys(words).filter(number).map((state) => `${number(state)} ${words[state]}`).join(", ");
    const what = `averaging ${under[0]?.name}${under.length > 1 ? ` and ${under.length - 1} more` : ""}`;
    const takeaway = !under.length ? `${when}: ${now}, ${number("mean")} of ${states.length} all-reduces done`
      : `${when}: ${what}${/^(waits|step)/.test(doing) ? " while rank 0 waits, exposed" : `, hidden behind rank 0's ${doing.split(" ")[0]}`}`;
    const shares = `${secondsOf(hidden / 1e9)} hidden, ${secondsOf(exposed / 1e9)} exposed (${percent(exposed / (hidden + exposed))})`;
    return [takeaway, `Step ${secondsOf(done / 1e9)}, ${shares}.\neach rank: ${doing}; ${updated ? "new" : "old"} weights, ${percent(kept)} activations, `
      + `gradients of ${counted(states.length, "all-reduce")}: ${counts}`];
  },

  draw(pen, { begin, end, update, done, at, sent, held, doing, kept, updated, ranks }) {
    const left = 146, room = pen.wide - left - 2, bytes = sum(sent.map((each) => each.bytes)), least = Math.min(30, (0.6 * room) / sent.length);
    const wides = sent.map((each) => least + (room - least * sent.length) * (each.bytes / bytes)), lefts = sumsOf(wides).map((x) => left + x);
    [["weights", 0], ["activations", 56], ["gradients", left]].forEach(([words, x]) => pen.words(x, 12, words, { size: 12 }));
    for (let rank = 0; rank < Math.min(ranks, 4); rank++) {
      const y = 38 + 52 * rank;
      pen.words(0, y - 5, `rank ${rank}: ${doing}`, { bold: true });
      pen.box(0, y, 48, 26, updated ? SHARED : "#D9D2C5", updated ? "new" : "old");
      pen.box(56, y, 80, 26, IDLE);
      pen.box(56, y, 80 * kept, 26, "#56B4E9", kept ? percent(kept) : []);
      held.forEach(([state, share], place) => {
        const x = lefts[place], wide = Math.max(1, wides[place] - 1), mine = RANKS[rank], made = state === "own" || state === "sent";
        pen.box(x, y, wide, 26, state === "mean" ? SHARED : made ? mine : IDLE, { mean: "mean", own: `g${rank}`, sent: `g${rank}` }[state] ?? []);
        if (state === "filling") pen.box(x, y, wide * share, 26, mine, [], { "fill-opacity": 0.5 });
        if (state === "sent") pen.box(x, y, wide * share, 26, SHARED);
        if (state === "sent") pen.frame(x, y, wide, 26);
      });
    }
    const low = pen.tall + 22, x = (time) => (time / done) * (pen.wide - 2), bar = (from, to, row, ...look) => pen.box(x(from), low + 30 * row, x(to) - x(from), 26, ...look);
    pen.words(0, low - 6, "compute; under it all-reduces", { bold: true });
    for (const each of [[0, begin, 0, "#56B4E9", ["forward", "F"]], [begin, end, 0, "#E69F00", ["backward", "B"]], [update, done, 0, "#CC79A7", ["optimizer", "O"]]]) bar(...each);
    for (const [start, stop, hidden] of sent.flatMap((each) => [[each.start, Math.min(each.end, end), true], [Math.max(each.start, end), each.end, false]])) {
      if (stop > start) bar(start, stop, 1, hidden ? "#0072B2" : "#D55E00", [], { stroke: "#fff", "stroke-width": 0.5 });
    }
    pen.path([[x(at), low - 3], [x(at), low + 60]], "currentColor");
    pen.legend([[IDLE, "not there yet"], [RANKS[0], "a rank's own"], [SHARED, "the mean"], ["#0072B2", "all-reduce, hidden"], ["#D55E00", "all-reduce, exposed"]]);
  },
};
