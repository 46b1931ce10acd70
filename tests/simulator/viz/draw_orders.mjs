// Draws questions about schedules, and gives the builder's answers: for test_builder_engine.py, which knows Python's.
// Usage: node draw_orders.mjs QUESTIONS SCRIPTS: a list of questions as JSON, and the engine's scripts.
import { readFileSync } from "node:fs";

const [questions, ...paths] = process.argv.slice(2);
const NAMES = "parse print graphOf orderOf tableOf run summary peaks critical chainOf whyIdle Build nameOf "
  + "known recognise parOf";
const scripts = paths.map((path) => readFileSync(path, "utf8")).join("\n");
const E = new Function(`${scripts}\nreturn { ${NAMES.split(" ").join(", ")} };`)();

// ---- chance

class Chance {
  constructor(seed) { this.state = seed + 0x9e3779b9; for (let i = 0; i < 20; i++) this.next(); }
  next() { // xorshift32 (Marsaglia 2003)
    this.state ^= this.state << 13;
    this.state ^= this.state >>> 17;
    this.state ^= this.state << 5;
    return (this.state >>> 0) / 2 ** 32;
  }
  below(n) { return Math.floor(this.next() * n); }
  from(low, high) { return low + this.below(high - low + 1); }
  pick(list) { return list[this.below(list.length)]; }
}

const range = (n) => Array.from({ length: n }, (_, i) => i);

// Stages on ranks in a loop, as a V or anyhow (a rank may have none); each backward pass whole or split.
function siteOf(chance, ranks, per, microbatches) {
  const p = chance.from(1, ranks), m = chance.from(1, microbatches);
  const loop = range(p * chance.from(1, per)).map((s) => s % p);
  const folded = loop.map((r, s) => (Math.floor(s / p) % 2 ? p - 1 - r : r)), any = loop.map(() => chance.below(p));
  const whole = chance.pick([0, 0.5, 1]), split = range(loop.length * m).map(() => chance.next() >= whole);
  return { ranks: p, home: chance.pick([loop, loop, folded, any]), microbatches: m, split };
}

// What may run once `done` has (a set of names): by the definition of a pipeline, not by the engine.
function readyOf({ home, microbatches, split }, done) {
  const found = [];
  home.forEach((_, s) => range(microbatches).forEach((m) => {
    const isSplit = split[s * microbatches + m], back = isSplit ? "I" : "B";
    if (!done.has(`${s}F${m}`)) {
      if (!s || done.has(`${s - 1}F${m}`)) found.push({ stage: s, kind: "F", microbatch: m });
    } else if (!done.has(`${s}${back}${m}`)) {
      const last = s === home.length - 1, behind = done.has(`${s + 1}B${m}`) || done.has(`${s + 1}I${m}`);
      if (last || behind) found.push({ stage: s, kind: back, microbatch: m });
    } else if (isSplit && !done.has(`${s}W${m}`)) found.push({ stage: s, kind: "W", microbatch: m });
  }));
  return found;
}

function legal(chance, site) {
  const weight = Object.fromEntries([..."FBIW"].map((kind) => [kind, chance.next() + 0.01])); // orders of any character
  const done = new Set(), moves = [];
  for (let options; (options = readyOf(site, done)).length;) {
    let left = chance.next() * options.reduce((sum, { kind }) => sum + weight[kind], 0);
    const move = options.find(({ kind }) => (left -= weight[kind]) < 0) ?? options[0];
    done.add(E.nameOf(move));
    moves.push(move);
  }
  return moves;
}

const rowsOf = ({ ranks, home }, moves) =>
  range(ranks).map((rank) => moves.filter(({ stage }) => home[stage] === rank));

// Makes one or two faults: swaps, moves, drops or repeats an action, or changes its kind or number.
function spoil(chance, rows) {
  for (let faults = chance.pick([1, 1, 2]); faults; faults--) {
    const full = rows.filter((row) => row.length);
    if (!full.length) return;
    const row = chance.pick(full), other = chance.pick(full);
    const i = chance.below(row.length), j = chance.below(row.length);
    const swap = () => { [row[i], row[j]] = [row[j], row[i]]; };
    const change = (part) => () => { row[i] = { ...row[i], ...part }; };
    chance.pick([swap, swap, swap, swap, () => row.splice(i, 1), () => row.splice(j, 0, row[i]),
      () => other.splice(chance.below(other.length + 1), 0, row.splice(i, 1)[0]),
      change({ kind: chance.pick([..."FBIW"]) }), change({ microbatch: chance.pick([0, 3, 7, 11]) })])();
  }
}

// A number or one per stage: whole, of one digit, of many, or half a nanosecond more; some stages may be slow.
function timesOf(chance, stages) {
  const forms = [() => chance.below(6), () => chance.below(40) / 10, () => 3 * chance.next(),
    () => (chance.below(9) + 0.5) / 1e6];
  const one = () => chance.pick(forms);
  const draw = () => { const number = one(); return chance.below(2) ? range(stages).map(number) : number(); };
  const slow = chance.pick([1, range(stages).map(() => chance.pick([1, 1.5, 0.7]))]);
  return { F: draw(), I: draw(), W: draw(), message: chance.pick([0, draw(), draw()]), slow };
}

// ---- what Python asks

const ASKED = {
  // Orders that are legal, half-built, spoiled, or whose rows are from two legal orders (often a deadlock).
  orders: (chance, { count }) => range(count).map((k) => {
    const site = siteOf(chance, 5, 3, 6), whole = k % 8 !== 4;
    let moves = legal(chance, site), rows;
    const least = 1 + moves.findIndex(({ stage }) => stage === site.home.length - 1);
    if (!whole) moves = moves.slice(0, chance.from(least, moves.length));
    rows = rowsOf(site, moves);
    if (k % 4 === 3) rows = rowsOf(site, legal(chance, site)).map((row, rank) => chance.pick([row, rows[rank]]));
    else if (k % 2) spoil(chance, rows);
    return { whole, text: E.print(rows), times: timesOf(chance, E.graphOf(rows).stages) };
  }).filter(({ text }) => text.includes("0")).map((drawn) => ({ ...drawn, ...answer(drawn) })), // without empty ones

  texts: (chance, { count, junk }) => range(count).map(() => {
    const site = siteOf(chance, 5, 3, 6);
    let text = E.print(rowsOf(site, legal(chance, site))).slice(0, chance.pick([30, 200])).replace(/,[^,]*$/, "");
    for (let n = chance.from(1, 3); n; n--) {
      const at = chance.from(0, text.length), seam = () => chance.pick([",", "", " "]);
      text = text.slice(0, at) + seam() + chance.pick(junk) + seam() + text.slice(at);
    }
    try { return [text, E.print(E.parse(text))]; } catch (error) { return [text, error.message.split(":")[0]]; }
  }),

  known: (_, site) => Object.fromEntries(E.known({ ...site, kinds: "FBIW" }).map(([title, rows]) => {
    const other = (one) => ({ ...one, microbatch: site.microbatches - 1 - one.microbatch });
    const renumbered = rows.map((row) => row.map(other));
    return [title, [E.print(rows), E.recognise(rows, site.home), E.recognise(renumbered, site.home)]];
  })),
  name: (_, { text, home }) => E.recognise(E.parse(text), home),

  pars: (chance, { count, sites }) => [...range(count).map(() => {
    const { ranks, home, microbatches } = siteOf(chance, 4, 3, 6);
    const limit = chance.pick([undefined, 1, 2, 4, 6, 9]), kinds = chance.pick(["FB", "FIW", "FBIW"]);
    return { ranks, home, microbatches, kinds, limit, times: timesOf(chance, home.length) };
  }), ...sites].map((site) => { // a level's own best can be placed, move by move
    const build = site.best && new E.Build(site), stops = build?.replay(E.parse(site.best.text)) || build?.deadEnd();
    return [site, E.parOf(site, site.times), build && !build.finished ? stops || "not finished" : ""];
  }),

  // Random play within a limit: what the engine says of dead ends, beside an exhaustive search; returns how often each.
  deadEnds(chance, { count }) {
    const counts = {};
    for (let k = 0; k < count; k++) {
      const site = { ...siteOf(chance, 3, 3, 2), kinds: "FBIW" }, known = new Map();
      site.limit = range(site.ranks).map(() => chance.from(1, 4));
      const held = (done, rank) => [...done].reduce((sum, name) => {
        const [, stage, kind] = /(\d+)(\w)/.exec(name);
        return sum + (site.home[stage] === rank ? { F: 1, B: -1, I: 0, W: -1 }[kind] : 0);
      }, 0);
      const isFull = (done, rank) => held(done, rank) >= site.limit[rank];
      const options = (done) => readyOf(site, done)
        .filter(({ stage, kind }) => kind !== "F" || !isFull(done, site.home[stage]));
      const total = site.split.reduce((sum, isSplit) => sum + (isSplit ? 3 : 2), 0);
      const ends = (done) => {
        const key = [...done].sort().join();
        const goOn = () => options(done).some((one) => ends(new Set([...done, E.nameOf(one)])));
        if (!known.has(key)) known.set(key, done.size === total || goOn());
        return known.get(key);
      };
      const build = new E.Build(site), done = new Set();
      for (let can, wrong = "", said = build.deadEnd(); ; said = build.deadEnd()) {
        const words = `${wrong}${said ? "dead" : "alive"}, is ${ends(done) ? "alive" : "dead"}`;
        counts[words] = (counts[words] ?? 0) + 1;
        if (!(can = options(done)).length) break;
        const move = chance.pick(can);
        wrong = build.place(move) ? "wrong: " : "";
        done.add(E.nameOf(move));
      }
    }
    return counts;
  },
};

function answer({ text, times, whole }) {
  const rows = E.parse(text), graph = E.graphOf(rows), order = E.orderOf(graph), home = [];
  graph.actions.forEach(({ stage, rank }) => { home[stage] ??= rank; });
  const numbered = [...home].every((rank) => rank !== undefined) && !(whole && rows.some((row) => !row.length));
  const build = numbered && new E.Build({ ranks: graph.ranks, microbatches: graph.microbatches, home, kinds: "FBIW" });
  const moved = numbered && build.replay(rows) === "" && (!whole || build.finished); // the verdict, move by move
  if (order.length < graph.actions.length) return { moved };
  const table = E.tableOf(times, graph.stages), ran = E.run(graph, table);
  const every = (of) => graph.actions.map((_, i) => of(graph, table, ran, i));
  return { moved, ...ran, ...E.summary(graph, ran), peaks: E.peaks(rows), ...E.critical(graph, table, ran),
    chains: every(E.chainOf), why: every(E.whyIdle) };
}

const answers = JSON.parse(questions).map(({ ask, seed = 0, ...rest }) => ASKED[ask](new Chance(seed), rest));
console.log(JSON.stringify(answers));
