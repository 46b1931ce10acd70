// The engine of the schedule builder: texts, rules, times, memory and names of pipeline schedules. It draws nothing.
// A plain script: it is joined with what draws, in a page, a notebook or node. Rules and times are those of Python
// (distlab.plan.validate, simulate_schedule); tests/simulator/viz/test_builder_engine.py compares them on drawn cases.
//
// Rows are what each rank runs, in order: arrays of { stage, kind, microbatch }, kind one of F, B, I, W (B is I and W
// in one). Times are { F, I, W, message, slow } in ms: a number or one per stage; `slow` are factors of a stage's F, I
// and W. What comes out is whole nanoseconds. Memory is counted in activations of one stage of one micro-batch, as
// Python's peak_in_flight counts: an F takes one, its B or W frees it. A limit is per rank: a number, or one per rank.
//   parse(text) -> rows, print(rows), parseAction(text), nameOf(action), computations(rows)
//   check(rows) -> null, or { rule, rank, step, action, reason } of the first fault
//   graphOf(rows) -> graph, orderOf(graph) -> { order, whole }, tableOf(times, stages) -> table
//   run(graph, table) -> times { start, end }, summary(graph, times) -> { length, bubble, span }, held(rows), peaks(rows)
//   critical(graph, table, times) -> { slack, path }, chainOf and whyIdle(graph, table, times, i): why rank idles before i
//   new Build({ ranks, microbatches, home, kinds, limit }): place(action) -> "" or why not; undo(), next(rank), ready(),
//     deadEnd(move) -> "" or why the limit lets nothing finish any more; replay(rows); rows, moves, now, finished
//   FAMILIES, known(site) -> schedules by name, recognise(rows, home) -> { is, like }, parOf(site, times)

const KINDS = ["F", "B", "I", "W"];
const NUMBER = "(?:0|[1-9][0-9]*)";
const ACTION = new RegExp(`^(${NUMBER})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(${NUMBER})$`);
const PARAMETERS = new RegExp(`^${NUMBER}(?:UNSHARD|RESHARD|REDUCE_GRAD)(?:${NUMBER})?$`);
const OVERLAP = /^\(([^()]*)\)OVERLAP_F_B$/;
// Python's str.splitlines and \s, spelled out: JavaScript's own differ (U+001C to U+001F, U+0085, U+FEFF).
const LINES = /\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]/;
const BLANK = "\\t\\n\\v\\f\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const CELL = new RegExp(`[^,${BLANK}]+`, "g"), NOT_BLANK = new RegExp(`[^${BLANK}]`);
const HOW = "STAGE KIND MICROBATCH without blanks, such as 2F0; KIND is one of F, B, I, W";

const nameOf = ({ stage, kind, microbatch }) => `${stage}${kind}${microbatch}`;
const isBackward = (kind) => kind === "B" || kind === "I";

// ---- text

function parseAction(text) {
  const match = ACTION.exec(text), shown = `'${text.slice(0, 40)}'`;
  if (!match) {
    const meant = ACTION.test(text.toUpperCase()) ? `; did you mean ${text.toUpperCase()}?` : "";
    throw new Error(`${shown} is not an action; write ${HOW}${meant}`);
  }
  const [stage, microbatch] = [Number(match[1]), Number(match[3])];
  if (Math.max(stage, microbatch) >= 2 ** 31) throw new Error(`${shown}: numbers are below 2**31`);
  return { stage, kind: match[2], microbatch };
}

// Reads a line per rank; a line of commas alone is a rank with nothing to do. Sends and receives stay.
function parse(text) {
  const rows = [];
  text.split(LINES).forEach((line, number) => {
    if (!NOT_BLANK.test(line)) return;
    const row = [];
    for (const { 0: cell, index } of line.matchAll(CELL)) {
      if (PARAMETERS.test(cell)) continue;
      const overlap = OVERLAP.exec(cell);
      try {
        row.push(...(overlap ? overlap[1].split(";") : [cell]).map(parseAction));
      } catch (error) {
        throw new Error(`line ${number + 1}, column ${index + 1}: ${error.message}`);
      }
    }
    rows.push(row);
  });
  if (!rows.length) throw new Error(`the text holds no schedule; write one line per rank, each action ${HOW}`);
  return rows;
}

const print = (rows) => rows.map((row) => row.map(nameOf).join(",") || ",").join("\n");
const computations = (rows) => rows.map((row) => row.filter(({ kind }) => KINDS.includes(kind)));

// ---- the graph: what each action waits for

// Lays the rows out one after the other. `need` is the action that each one waits for beside its rank's previous one:
// -1 for none, -2 for one that no rank runs. `prev` is the rank's previous action or -1.
function graphOf(rows) {
  const actions = [], prev = [], place = new Map();
  let stages = 0, microbatches = 0;
  for (const row of rows) {
    for (const { stage, microbatch } of row) {
      stages = Math.max(stages, stage + 1);
      microbatches = Math.max(microbatches, microbatch + 1);
    }
  }
  const slot = (stage, kind, microbatch) => 3 * (stage * microbatches + microbatch) + "FBW".indexOf(kind === "I" ? "B" : kind);
  rows.forEach((row, rank) => row.forEach(({ stage, kind, microbatch }, step) => {
    const own = slot(stage, kind, microbatch);
    if (!place.has(own)) place.set(own, actions.length);
    prev.push(step ? actions.length - 1 : -1);
    actions.push({ stage, kind, microbatch, rank, step });
  }));
  const at = (stage, kind, microbatch) =>
    stage >= 0 && stage < stages && microbatch < microbatches ? place.get(slot(stage, kind, microbatch)) ?? -2 : -2;
  const need = actions.map(({ stage, kind, microbatch }) => {
    if (kind === "F") return stage ? at(stage - 1, "F", microbatch) : -1;
    if (kind === "W") return at(stage, "B", microbatch);
    return stage === stages - 1 ? at(stage, "F", microbatch) : at(stage + 1, "B", microbatch);
  });
  const remote = need.map((other, i) => other >= 0 && actions[other].rank !== actions[i].rank);
  return { actions, prev, need, remote, at, stages, microbatches, ranks: rows.length };
}

// Returns an order in which all actions can run, and whether it is all of them (else some wait for ever: a deadlock).
function orderOf({ actions, prev, need }) {
  const followers = actions.map(() => []), waiting = new Int32Array(actions.length), order = [];
  actions.forEach((_, i) => {
    for (const before of [prev[i], need[i]]) {
      if (before >= 0) followers[before].push(i);
      if (before !== -1) waiting[i]++;
    }
    if (!waiting[i]) order.push(i);
  });
  for (let k = 0; k < order.length; k++) for (const next of followers[order[k]]) if (!--waiting[next]) order.push(next);
  return { order, whole: order.length === actions.length, waiting };
}

// ---- rules of a whole schedule: the verdict, and the place of the first fault

function check(rows) {
  const graph = graphOf(rows), { actions, stages, microbatches } = graph, size = stages * microbatches;
  const fault = (rule, one, reason) =>
    ({ rule, rank: one?.rank ?? null, step: one?.step ?? null, action: one ? nameOf(one) : "", reason });
  const homes = new Map(), first = { F: new Map(), B: new Map(), W: new Map() }, again = {};
  let stray = null, unwanted = null;
  actions.forEach((one, i) => {
    const { stage, kind, microbatch, rank } = one, group = kind === "I" ? "B" : kind, key = stage * microbatches + microbatch;
    if (!homes.has(stage)) homes.set(stage, rank);
    if (homes.get(stage) !== rank && !(stray?.stage <= stage)) stray = one;
    if (!first[group].has(key)) first[group].set(key, i);
    else if (!(again[group]?.key <= key)) again[group] = { key, i };
  });
  const kindAt = (key) => actions[first.B.get(key)]?.kind;
  unwanted = actions.find(({ stage, kind, microbatch }) => kind === "W" && kindAt(stage * microbatches + microbatch) === "B");
  const twice = (group) => again[group] && fault("twice", actions[again[group].i], group === "B"
    ? "B is I and W in one: keep one B, or one I and one W" : `${nameOf(actions[again[group].i])} is there twice`);
  const gap = (kind, has) => {
    let key = 0;
    while (key < size && has(key)) key++;
    if (key === size) return null;
    const stage = Math.floor(key / microbatches), one = { stage, kind, microbatch: key % microbatches };
    return fault("missing", { ...one, rank: homes.get(stage) }, `${nameOf(one)} is in no rank's order`);
  };
  if (!actions.length) return fault("empty", null, "the schedule has no action");
  if (stray) return fault("place", stray, `stage ${stray.stage} is on rank ${homes.get(stray.stage)}, not on rank ${stray.rank}`);
  const found = twice("F") || gap("F", (key) => first.F.has(key)) || twice("B") || twice("W")
    || (unwanted && fault("twice", unwanted, `${nameOf(unwanted)} next to a B, which computes the weight gradient too`))
    || gap("B", (key) => first.B.has(key)) || gap("W", (key) => kindAt(key) === "B" || first.W.has(key));
  if (found) return found;
  const pairs = [...first.F.keys()].sort((a, b) => a - b).map((key) => [first.F.get(key), first.B.get(key)]);
  for (let key = 0; key < size; key++) if (first.W.has(key)) pairs.push([first.B.get(key), first.W.get(key)]);
  actions.forEach(({ stage, kind, microbatch, rank }, i) => { // stages that share a rank hand over in memory
    const next = kind === "W" ? -2 : graph.at(kind === "F" ? stage + 1 : stage - 1, kind, microbatch);
    if (next >= 0 && actions[next].rank === rank) pairs.push([i, next]);
  });
  const wrong = pairs.filter(([before, after]) => before > after).map((pair) => pair.map((i) => actions[i]))
    .reduce((least, pair) => (least && least[1].step <= pair[1].step ? least : pair), null);
  if (wrong) return fault("order", wrong[1], `${nameOf(wrong[1])} needs ${nameOf(wrong[0])} first, on the same rank`);
  const { whole, waiting } = orderOf(graph);
  return whole ? null : deadlock(graph, waiting, fault);
}

function deadlock({ actions, need, ranks }, waiting, fault) {
  const stuck = Array(ranks).fill(-1), path = []; // the first action of each rank that never starts
  actions.forEach((one, i) => { if (waiting[i] && stuck[one.rank] < 0) stuck[one.rank] = i; });
  let rank = stuck.findIndex((i) => i >= 0);
  for (; !path.includes(rank); rank = actions[need[stuck[rank]]].rank) path.push(rank);
  const circle = path.slice(path.indexOf(rank)).map((one) => [one, actions[stuck[one]], actions[need[stuck[one]]]]);
  const waits = circle.slice(0, 6).map(([one, own, other]) => `rank ${one} at ${nameOf(own)} waits for ${nameOf(other)}`);
  return fault("deadlock", circle[0][1], `deadlock: ${waits.join("; ")}`);
}

// ---- times and memory

function halfEven(x) { // rounds as numpy's rint
  const low = Math.floor(x), half = x - low;
  return half > 0.5 || (half === 0.5 && low % 2) ? low + 1 : low;
}

// Returns nanoseconds of each stage's actions and messages. B takes as long as I and W.
function tableOf({ F, I, W, message = 0, slow = 1 }, stages) {
  const of = (value, stage) => (Array.isArray(value) ? value[stage] : value);
  const each = (value, factor) => Array.from({ length: stages }, (_, stage) => {
    const number = factor === 1 ? of(value, stage) : of(value, stage) * of(factor, stage);
    if (!(number >= 0 && number * 1e6 < 2 ** 50)) throw new Error(`a time is ${number} ms; pass times of 0 ms or more`);
    return halfEven(number * 1e6);
  });
  const [forward, input, weight] = [each(F, slow), each(I, slow), each(W, slow)];
  return { F: forward, B: input.map((ns, s) => ns + weight[s]), I: input, W: weight, message: each(message, 1) };
}

// Returns start and end of each action: it starts when its rank is free and what it needs has arrived.
function run(graph, table, order = orderOf(graph).order) {
  const { actions, prev } = graph, start = Array(actions.length).fill(NaN), end = start.slice();
  for (const i of order) {
    const { stage, kind } = actions[i];
    start[i] = Math.max(prev[i] < 0 ? 0 : end[prev[i]], arrival(graph, table, end, i));
    end[i] = start[i] + table[kind][stage];
  }
  return { start, end };
}

const travel = ({ actions, need, remote }, table, i) => (remote[i] ? table.message[actions[need[i]].stage] : 0);

// When what an action needs from elsewhere is there; 0 where it needs nothing.
const arrival = (graph, table, end, i) => (graph.need[i] < 0 ? 0 : end[graph.need[i]] + travel(graph, table, i));

const CHANGE = { F: 1, B: -1, I: 0, W: -1 };

// What each rank holds after each of its actions, and at most.
const held = (rows) => rows.map((row) => { let now = 0; return row.map(({ kind }) => (now += CHANGE[kind])); });
const peaks = (rows) => held(rows).map((series) => Math.max(0, ...series));

// Returns the length, the idle share of the ranks' time, and the longest time from a rank's first start to its end.
function summary(graph, { start, end }) {
  const length = Math.max(0, ...end), seconds = length / 1e9, spans = Array.from({ length: graph.ranks }, () => [Infinity, 0]);
  const work = end.reduce((sum, one, i) => sum + one - start[i], 0) / 1e9;
  graph.actions.forEach(({ rank }, i) => { spans[rank] = [Math.min(spans[rank][0], start[i]), Math.max(spans[rank][1], end[i])]; });
  return { length, bubble: seconds ? 1 - work / graph.ranks / seconds : 0, span: Math.max(0, ...spans.map(([from, to]) => to - from)) };
}

// ---- what waits for what

// Returns how much later each action could end with the same length, and one path of actions without slack.
function critical(graph, table, times, order = orderOf(graph).order) {
  const { actions, prev, need } = graph, { start, end } = times, length = Math.max(0, ...end), path = [];
  const latest = Array(actions.length).fill(length);
  for (const i of [...order].reverse()) {
    const begin = latest[i] - (end[i] - start[i]);
    if (prev[i] >= 0) latest[prev[i]] = Math.min(latest[prev[i]], begin);
    if (need[i] >= 0) latest[need[i]] = Math.min(latest[need[i]], begin - travel(graph, table, i));
  }
  for (let i = end.indexOf(length); i >= 0; i = causeOf(graph, table, times, i)) path.unshift(i);
  return { slack: latest.map((one, i) => one - end[i]), path };
}

// The action whose end (and message) let this one start: a message where both came at once; -1 where nothing did.
function causeOf(graph, table, { start, end }, i) {
  return graph.need[i] >= 0 && arrival(graph, table, end, i) === start[i] ? graph.need[i] : graph.prev[i];
}

// The actions that a rank waits for, one behind the other, where it idles before action i; the last one did not wait.
function chainOf({ prev, need }, table, { start, end }, i) {
  const chain = [], waits = (at) => start[at] > (prev[at] < 0 ? 0 : end[prev[at]]);
  for (let at = i; waits(at);) chain.push(at = need[at]);
  return chain;
}

// Says in one line why a rank idles before action i, back to the work that everything waits for; "" where it does not.
function whyIdle(graph, table, times, i) {
  const { actions, prev } = graph, chain = chainOf(graph, table, times, i);
  if (!chain.length) return "";
  const said = chain.map((at, k) => {
    const far = travel(graph, table, k ? chain[k - 1] : i) > 0 ? "a message from " : "";
    return `${far}${nameOf(actions[at])} on rank ${actions[at].rank}`;
  });
  const last = chain[chain.length - 1], after = prev[last] < 0 ? "" : `, which ran right after ${nameOf(actions[prev[last]])}`;
  if (said.length > 4) said.splice(3, said.length - 4, "and so on");
  return `${nameOf(actions[i])} waits for ${said.join(", which waits for ").replace("which waits for and so on, which", "and so on: the last one")}${after}`;
}

// What the same order would win if all times of a kind were a share shorter; B stands for I and W together.
function gains(graph, times, stages, kinds, share = 0.1) {
  const length = (changed) => summary(graph, run(graph, tableOf(changed, stages))).length;
  const now = length(times), less = (value) => (Array.isArray(value) ? value.map(less) : value * (1 - share));
  const shorter = (names) => length({ ...times, ...Object.fromEntries(names.map((name) => [name, less(times[name] ?? 0)])) });
  return Object.fromEntries([...kinds, "message"].map((kind) => [kind, now - shorter(kind === "B" ? ["I", "W"] : [kind])]));
}

// ---- building: one move after the other. A move starts as soon as it can, so it never changes an earlier one.

class Build {
  constructor(site) {
    Object.assign(this, { limit: Infinity, kinds: "FB", ...site });
    this.stages = this.home.length;
    this.letter = [...this.kinds].filter(isBackward).join(" or ");
    this.clear();
  }

  clear() {
    this.rows = Array.from({ length: this.ranks }, () => []);
    this.done = new Uint8Array(this.stages * this.microbatches); // what has run: a bit for each of KINDS
    this.up = new Int32Array(this.microbatches); // forward passes run of each micro-batch
    this.now = Array(this.ranks).fill(0);
    this.moves = [];
  }

  limitOf(rank) { return (Array.isArray(this.limit) ? this.limit[rank] : this.limit) ?? Infinity; }
  bits(stage, microbatch) { return this.done[stage * this.microbatches + microbatch]; }
  has(stage, kind, microbatch) { return (this.bits(stage, microbatch) & (1 << KINDS.indexOf(kind))) > 0; }
  hasBackward(stage, microbatch) { return (this.bits(stage, microbatch) & 6) > 0; }
  get total() { return this.moves.reduce((sum, { kind }) => sum + (kind === "B" ? 2 : 1), 0); } // B counts as I and W
  get finished() { return this.total === 3 * this.stages * this.microbatches; }

  // Returns "" for a move that may be made, or one line that says why not.
  why({ stage, kind, microbatch }, onRank) {
    const { home, stages, letter } = this, name = `${stage}${kind}${microbatch}`, rank = home[stage];
    if (!(stage < stages)) return `${name}: there are stages 0 to ${stages - 1}`;
    if (!(microbatch < this.microbatches)) return `${name}: there are micro-batches 0 to ${this.microbatches - 1}`;
    if (onRank !== undefined && onRank !== rank) return `${name}: stage ${stage} is on rank ${rank}, not on rank ${onRank}`;
    if (this.has(stage, kind, microbatch)) return `${name} is placed already`;
    if (!this.kinds.includes(kind)) return `${name}: here a schedule is made of ${[...this.kinds].join(", ")}`;
    const who = (other) => (stages > this.ranks ? `stage ${other}` : `rank ${home[other]}`);
    const needs = (other, what) => `${kind} of micro-batch ${microbatch} on ${who(stage)} needs ${
      other === stage ? "its own" : `${who(other)}'s`} ${what} first`;
    if (kind === "W") {
      if (this.has(stage, "B", microbatch)) return `${name}: ${stage}B${microbatch} computed the weight gradient already`;
      return this.has(stage, "I", microbatch) ? "" : needs(stage, "I");
    }
    if (kind === "F") {
      if (this.up[microbatch] < stage) return needs(stage - 1, "F");
      if (this.now[rank] < this.limitOf(rank)) return "";
      const frees = [...this.kinds].filter((one) => CHANGE[one] < 0).join(" or ");
      return `rank ${rank} holds ${this.now[rank]} activations, its limit; a ${frees} must free one first`;
    }
    if (this.hasBackward(stage, microbatch)) return `${name}: B is I and W in one, and the other form is placed`;
    if (this.up[microbatch] <= stage) return needs(stage, "F");
    return stage === stages - 1 || this.hasBackward(stage + 1, microbatch) ? "" : needs(stage + 1, letter);
  }

  place(action, onRank) {
    const reason = this.why(action, onRank);
    if (!reason) this.set(action, 1);
    return reason;
  }

  undo() {
    const action = this.moves[this.moves.length - 1];
    if (action) this.set(action, -1); // the last move is the last of its rank
    return action ?? null;
  }

  set(action, by) {
    const { stage, kind, microbatch } = action, rank = this.home[stage];
    for (const list of [this.rows[rank], this.moves]) if (by > 0) list.push(action); else list.pop();
    this.done[stage * this.microbatches + microbatch] ^= 1 << KINDS.indexOf(kind);
    this.now[rank] += by * CHANGE[kind];
    if (kind === "F") this.up[microbatch] += by;
  }

  // Says in one line why the limit lets the schedule not be finished any more (after `move`, if given), or "".
  // Exact, without a search. A micro-batch frees nothing before it has reached the last stage; from there on all of its
  // backward passes need no memory. So what is under way can finish only if one of it can go all the way up within what
  // is free, and it does no harm to let that one go first: as the banker's algorithm does (Dijkstra 1965).
  deadEnd(move) {
    const { stages, microbatches, ranks, home } = this, limits = this.rows.map((_, rank) => this.limitOf(rank));
    if (limits.every((one) => one === Infinity)) return "";
    const parts = (from, to) => home.slice(from, to).reduce((sum, rank) => { sum[rank]++; return sum; }, Array(ranks).fill(0));
    const up = Array.from(this.up, (count, m) => count + (move?.kind === "F" && move.microbatch === m ? 1 : 0));
    let left = [...up.keys()].filter((m) => up[m] > 0 && up[m] < stages), free = limits;
    for (const m of left) free = parts(0, up[m]).map((count, rank) => free[rank] - count);
    const lacks = (m) => parts(up[m], stages).findIndex((count, rank) => count > free[rank]);
    for (let count = -1; left.length !== count;) {
      count = left.length;
      left = left.filter((m) => {
        if (lacks(m) < 0) free = parts(0, up[m]).map((one, rank) => free[rank] + one);
        else return true;
        return false;
      });
    }
    if (!left.length) left = [...up.keys()].filter((m) => !up[m] && lacks(m) >= 0);
    if (!left.length) return "";
    const rank = lacks(left[0]), more = parts(up[left[0]], stages)[rank];
    return `dead end: micro-batch ${left[0]} cannot reach the last stage any more: it needs ${more} more on rank ${rank}, `
      + `where at most ${Math.max(0, free[rank])} of ${limits[rank]} can become free; undo`;
  }

  // The next micro-batch of each stage and kind on a rank: what a page offers. `reason` says why it may not be placed
  // (""; then `dead` says whether it would be a dead end).
  next(rank) {
    const offers = [];
    this.home.forEach((home, stage) => {
      if (home !== rank) return;
      for (const kind of this.kinds) {
        const other = kind === "F" ? 1 : kind === "B" ? 6 : kind === "I" ? 6 : 10; // bits that leave no such action
        let first = null;
        for (let microbatch = 0; microbatch < this.microbatches; microbatch++) {
          if (this.bits(stage, microbatch) & other) continue;
          const action = { stage, kind, microbatch }, reason = this.why(action);
          if (!reason) first = { action, reason, dead: this.deadEnd(action) };
          first ??= { action, reason, dead: "" };
          if (!reason) break;
        }
        if (first) offers.push(first);
      }
    });
    return offers;
  }

  // All moves that may be made, of every rank.
  ready() {
    const found = [], all = (count) => Array.from({ length: count }, (_, i) => i);
    for (const stage of all(this.stages)) for (const kind of this.kinds) for (const microbatch of all(this.microbatches)) {
      if (!this.why({ stage, kind, microbatch })) found.push({ stage, kind, microbatch });
    }
    return found;
  }

  // Places whole rows, taking turns; returns "" or why the rest cannot be placed.
  replay(rows) {
    const at = rows.map(() => 0);
    for (let moved = true; moved;) {
      moved = false;
      rows.forEach((row, rank) => { while (at[rank] < row.length && !this.place(row[at[rank]], rank)) { at[rank]++; moved = true; } });
    }
    const stuck = rows.findIndex((row, rank) => at[rank] < row.length);
    return stuck < 0 ? "" : this.why(rows[stuck][at[stuck]], stuck);
  }
}

// ---- known schedules: those of distlab.plan that do not search

const count = (length, of = (i) => i) => Array.from({ length }, (_, i) => of(i));

const inTurn = (turns) => turns.sort(([a], [b]) => a - b).map(([, action]) => action); // those of one turn stay in order

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
  const rounds = v > 1 ? Math.max(1, Math.floor(m / p)) : 1, sizes = count(rounds, (k) => Math.floor(m / rounds) + (k < m % rounds));
  const passes = (turnOf) => sizes.flatMap((size, k) => {
    const start = sizes.slice(0, k).reduce((sum, one) => sum + one, 0);
    return count(v * size, (i) => [turnOf(Math.floor(i / size)), start + (i % size)]);
  });
  return takeTurns(p, passes((turn) => turn), passes((turn) => v - 1 - turn), (rank) => (v - 1) * sizes[0] + hop * (p - 1 - rank), delay);
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
    for (const [times, words] of lines(rank)) for (let k = 0; k < times; k++) for (const word of words.split(" ")) {
      const [half, kind, microbatch] = word === "W" ? oldest.shift() : [+word[0], word[1], (next[word.replace("B", "I")] ??= 0)];
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
    [behind, "1B 1F 0B"], [whole >> 1, "1B 0B"], [whole % 2, "1B 0I"], [whole >> 1, "1I 0I"], [behind, "W 0I"], [whole, "W"]];
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
    return inTurn(count(6 * m, (k) => [k - (k % 6) + slots[k % 6], {
      stage: "011010"[k % 6] === "0" ? rank : 2 * p - 1 - rank, kind: "FFIIWW"[k % 6], microbatch: Math.floor(k / 6) }]));
  });
}

// By title: how the stages lie ("one" per rank, in a "loop", as a "v"), and the maker for p ranks, m micro-batches and v
// stages per rank. Titles are those of distlab.plan.SCHEDULES.
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

// The known schedules of a site as [title, rows]: where a B may not be placed, an I and its W stand for it.
function known({ ranks, microbatches, home, kinds }) {
  const v = home.length / ranks, lies = { one: v === 1, loop: v > 1 && home.every((rank, stage) => rank === stage % ranks),
    v: v === 2 && home.every((rank, stage) => rank === Math.min(stage, home.length - 1 - stage)) };
  const split = (one) => (one.kind === "B" && !kinds.includes("B") ? [{ ...one, kind: "I" }, { ...one, kind: "W" }] : [one]);
  return Object.entries(FAMILIES).filter(([, [form]]) => lies[form])
    .map(([title, [, make]]) => [title, make(ranks, microbatches, v).map((row) => row.flatMap(split))])
    .filter(([, rows]) => rows.flat().every(({ kind }) => kinds.includes(kind)));
}

// Names a finished schedule: whatever numbers its micro-batches have ("is"), and wherever its W stand ("like").
function recognise(rows, home) {
  const numbers = new Map(), kinds = [...new Set(rows.flat().map(({ kind }) => kind))].join("");
  for (const { stage, kind, microbatch } of rows[home[0]]) if (kind === "F" && !stage) numbers.set(microbatch, numbers.size);
  const mine = rows.map((row) => row.map((one) => ({ ...one, microbatch: numbers.get(one.microbatch) })));
  const bare = (some) => print(some.map((row) => row.filter(({ kind }) => kind !== "W"))), is = [], like = [];
  for (const [title, some] of known({ ranks: rows.length, microbatches: numbers.size, home, kinds })) {
    if (print(some) === print(mine)) is.push(title);
    else if (bare(some) === bare(mine)) like.push(title);
  }
  return { is, like };
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
