// The schedules that the builder knows by name: those of distlab.plan that do not search. A plain script, joined after
// engine.js. Rows are as there.
//   known(site) -> [title, rows, isSplit] of those that fit its placement and kinds; FAMILIES makes them
//   recognise(rows, home) -> { is, like }: titles of a finished schedule
//   parOf(site, times) -> { length, title, rows } of the shortest one within the limit, or null

const count = (length, of = (i) => i) => Array.from({ length }, (_, i) => of(i));

const inTurn = (turns) => turns.sort(([a], [b]) => a - b).map(([, action]) => action); // equal turns keep their order

// A rank warms up with forward passes, then takes turns; W of a pass follows the I that is `delay` passes later.
function takeTurns(ranks, forward, backward, warmUp, delay) {
  return count(ranks, (rank) => {
    const turns = [];
    const add = (kind, passes, first) => passes.forEach(([turn, microbatch], k) =>
      turns.push([k + first, { stage: turn * ranks + rank, kind, microbatch }]));
    add("F", forward, -warmUp(rank));
    add(delay ? "I" : "B", backward, 0);
    if (delay) add("W", backward, delay(rank));
    return inTurn(turns);
  });
}

// One stage per rank, or `v` in a loop: a round of about as many micro-batches as ranks through all stages of a rank.
function looped(p, m, v, hop, delay) {
  const rounds = v > 1 ? Math.max(1, Math.floor(m / p)) : 1;
  const sizes = count(rounds, (k) => Math.floor(m / rounds) + (k < m % rounds));
  const passes = (turnOf) => sizes.flatMap((size, k) => {
    const start = sizes.slice(0, k).reduce((sum, one) => sum + one, 0);
    return count(v * size, (i) => [turnOf(Math.floor(i / size)), start + (i % size)]);
  });
  const warmUp = (rank) => (v - 1) * sizes[0] + hop * (p - 1 - rank);
  return takeTurns(p, passes((turn) => turn), passes((turn) => v - 1 - turn), warmUp, delay);
}

function breadthFirst(p, m, v) {
  const passes = count(v * m, (k) => [Math.floor(k / m), k % m]);
  return takeTurns(p, passes, [...passes].reverse(), () => v * m);
}

// Two stages per rank in a V, told as papers do: [3, "0F 1I"] is three times a forward of half 0, then an I of half 1.
// Each half and kind goes through the micro-batches in order; "W" is that of the oldest I. Those beyond m are left out.
function told(p, m, lines) {
  return count(p, (rank) => {
    const next = {}, row = [], oldest = [];
    for (const word of lines(rank).flatMap(([times, words]) => count(times, () => words.split(" ")).flat())) {
      const own = [Number(word[0]), word[1], next[word.replace("B", "I")] ?? 0];
      const [half, kind, microbatch] = word === "W" ? oldest.shift() : own;
      if (word !== "W") for (const one of kind === "B" ? "IW" : kind) next[half + one] = microbatch + 1;
      if (kind === "I") oldest.push([half, "W", microbatch]);
      row.push({ stage: half ? 2 * p - 1 - rank : rank, kind, microbatch });
    }
    return row.filter(({ microbatch }) => microbatch < m);
  });
}

const zbV = (p, m) => told(p, m, (rank) => {
  const all = Math.max(m, 2 * p - 1), end = p - rank, left = all - (2 * end - 1) - rank;
  return [[2 * end - 1, "0F"], [rank, "1F 0F"], [end, "1F 1I 1W"], [left, "0F 0I 0W 1F 1I 1W"],
    [all - p - left, "0I 0W 1F 1I 1W"], [rank, "0I 1I"], [end, "0I 0W"], [rank, "1W"], [rank, "0W"]];
});

const dualPipeV = (p, m) => told(p, m, (rank) => {
  const all = Math.max(m, 2 * p), behind = p - 1 - rank, whole = rank + 1;
  return [[2 * behind, "0F"], [whole, "0F 1F"], [behind, "1I W 1F"], [all - 2 * p + whole, "0F 1B 1F 0B"],
    [behind, "1B 1F 0B"], [whole >> 1, "1B 0B"], [whole % 2, "1B 0I"], [whole >> 1, "1I 0I"], [behind, "W 0I"],
    [whole, "W"]];
});

// V-Half and V-Min: the six actions of a micro-batch have slots on each rank, such that no two ever want the same one.
function repeated(p, m, [a, b, c, d]) {
  const last = p - 1, slotsOf = (rank, [x, y, z]) => {
    const top = a * last + x, turn = top + b * last + y;
    return [a * rank, top + b * (last - rank), turn + c * rank, turn + c * last + z + d * (last - rank)];
  };
  const turns = count(216, (k) => [1 + Math.floor(k / 36), 1 + (Math.floor(k / 6) % 6), 1 + (k % 6)]);
  const fits = (one) => count(p).every((rank) => new Set(slotsOf(rank, one).map((slot) => slot % 6)).size === 4);
  const best = turns.sort((one, two) => one[0] + one[1] + one[2] - two[0] - two[1] - two[2]).find(fits);
  return count(p, (rank) => {
    const slots = slotsOf(rank, best), busy = new Set(slots.map((slot) => slot % 6));
    for (let slot of slots.slice(2)) { // W take the first free slots
      do slot++; while (busy.has(slot % 6));
      busy.add(slot % 6);
      slots.push(slot);
    }
    const stage = (k) => ("011010"[k] === "0" ? rank : 2 * p - 1 - rank);
    const action = (k, microbatch) => ({ stage: stage(k), kind: "FFIIWW"[k], microbatch });
    return inTurn(count(6 * m, (k) => [k - (k % 6) + slots[k % 6], action(k % 6, Math.floor(k / 6))]));
  });
}

// By title: how the stages lie ("one" per rank, in a "loop", as a "v"), and what makes the rows of p ranks, m
// micro-batches and v stages per rank. Titles are those of distlab.plan.SCHEDULES.
const sorted = (rows) => rows.map((row) => inTurn(row.map((one) => [one.kind === "B", one])));
const FAMILIES = {
  "naive model parallelism": ["one", (p, m) => looped(p, m, 1, 0)],
  "GPipe": ["one", (p, m) => sorted(looped(p, m, 1, 0))],
  "GPipe with its backward passes reversed": ["one", (p, m) => breadthFirst(p, m, 1)],
  "1F1B": ["one", (p, m) => looped(p, m, 1, 1)],
  "ZB-H1": ["one", (p, m) => looped(p, m, 1, 1, (rank) => rank)],
  "ZB-H2": ["one", (p, m) => looped(p, m, 1, 2, (rank) => 2 * rank)],
  "interleaved 1F1B": ["loop", (p, m, v) => looped(p, m, v, 2)],
  "looped BFS": ["loop", breadthFirst],
  "interleaved zero bubble": ["loop", (p, m, v) => looped(p, m, v, 1, (rank) => rank)],
  "ZB-V": ["v", zbV],
  "V-Half": ["v", (p, m) => repeated(p, m, [2, 1, 2, 1])],
  "V-Min": ["v", (p, m) => repeated(p, m, [1, 1, 1, 1])],
  "DualPipeV": ["v", dualPipeV],
};

// The known schedules of a site; where a B may not be placed, an I and its W stand for it.
function known({ ranks, microbatches, home, kinds }) {
  const v = home.length / ranks, looks = (of) => home.every((rank, stage) => rank === of(stage));
  const loops = looks((stage) => stage % ranks), lies = { one: v === 1 && loops, loop: v > 1 && loops };
  lies.v = v === 2 && looks((stage) => Math.min(stage, home.length - 1 - stage));
  const isSplit = ({ kind }) => kind === "B" && !kinds.includes("B");
  const parts = (one) => (isSplit(one) ? [{ ...one, kind: "I" }, { ...one, kind: "W" }] : [one]);
  return Object.entries(FAMILIES).filter(([, [form]]) => lies[form]).map(([title, [, make]]) => {
    const rows = make(ranks, microbatches, v);
    return [title, rows.map((row) => row.flatMap(parts)), rows.flat().some(isSplit)];
  }).filter(([, rows]) => rows.flat().every(({ kind }) => kinds.includes(kind)));
}

// Names a finished schedule: whatever numbers its micro-batches have ("is"), and wherever its W stand ("like"; those
// that have no W of their own only where there is no other name).
function recognise(rows, home) {
  const numbers = new Map(), kinds = rows.flat().map(({ kind }) => kind), is = [], like = [], split = [];
  for (const { stage, kind, microbatch } of rows[home[0]]) {
    if (kind === "F" && !stage) numbers.set(microbatch, numbers.size);
  }
  const mine = rows.map((row) => row.map((one) => ({ ...one, microbatch: numbers.get(one.microbatch) })));
  const bare = (some) => print(some.map((row) => row.filter(({ kind }) => kind !== "W")));
  for (const [title, some, isSplit] of known({ ranks: rows.length, microbatches: numbers.size, home, kinds })) {
    if (print(some) === print(mine)) is.push(title);
    else if (bare(some) === bare(mine)) (isSplit ? split : like).push(title);
  }
  return { is, like: is.length ? [] : like.length ? like : split };
}

// The shortest of the known schedules of a site within its limit, and of its own `best` text if it has one, with these
// times: { length, title, rows }, or null where none fits.
function parOf(site, times) {
  const { ranks, home, limit, best } = site, table = tableOf(times, home.length);
  const all = best ? [...known(site), [best.title, parse(best.text)]] : known(site);
  let found = null;
  for (const [title, rows] of all) {
    if (peaks(rows).some((one, rank) => one > ((Array.isArray(limit) ? limit[rank] : limit) ?? Infinity))) continue;
    const graph = graphOf(rows), length = Math.max(0, ...run(graph, table).end);
    if (!found || length < found.length) found = { length, title, rows };
  }
  return found;
}
