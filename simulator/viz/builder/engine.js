// The engine of the schedule builder: texts, rules, times and memory of pipeline schedules. It draws nothing.
// A plain script: it is joined with what draws, in a page, a notebook or node. Rules and times are those of Python
// (distlab.plan.validate, simulate_schedule); tests/simulator/viz/test_builder_engine.py compares them on drawn cases.
//
// Rows are what each rank runs, in order: arrays of { stage, kind, microbatch }, kind one of F, B, I, W (B is I and W
// in one). Times are { F, I, W, message, slow } in ms: a number or one per stage; `slow` are factors of a stage's F, I
// and W. What comes out is whole nanoseconds. Memory is counted in activations of one stage of one micro-batch, as
// Python's peak_in_flight counts: an F takes one, its B or W frees it. A limit is per rank: a number, or one per rank.
//   parse(text) -> rows, print(rows), parseAction(text), nameOf(action), computations(rows)
//   graphOf(rows) -> graph, orderOf(graph) -> order, tableOf(times, stages) -> table
//   run(graph, table) -> times { start, end }, summary(graph, times) -> { length, bubble }, peaks(rows)
//   critical(graph, table, times) -> { slack, path }; chainOf and whyIdle(graph, table, times, i): why a rank idles
//   new Build({ ranks, microbatches, home, kinds, limit }): place(action) -> "" or why not; undo(), next(rank),
//     deadEnd() -> "" or why the limit lets nothing finish any more; replay(rows); rows, moves, now, finished
// known.js, joined after it, has the schedules with a name, and par.

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

const groupOf = (kind) => (kind === "I" ? "B" : kind); // B and I both pass a gradient back
const nameOf = ({ stage, kind, microbatch }) => `${stage}${kind}${microbatch}`;

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
  const slot = (stage, kind, microbatch) => 3 * (stage * microbatches + microbatch) + "FBW".indexOf(groupOf(kind));
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

// Returns an order in which actions can run; those that it lacks wait for ever: a deadlock.
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
  return order;
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
function run(graph, table, order = orderOf(graph)) {
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

// What each rank holds at most.
const peaks = (rows) => rows.map((row) => { let now = 0; return Math.max(0, ...row.map(({ kind }) => (now += CHANGE[kind]))); });

// Returns the length, and the idle share of the ranks' time.
function summary(graph, { start, end }) {
  const length = Math.max(0, ...end), seconds = length / 1e9, work = end.reduce((sum, one, i) => sum + one - start[i], 0) / 1e9;
  return { length, bubble: seconds ? 1 - work / graph.ranks / seconds : 0 };
}

// ---- what waits for what

// Returns how much later each action could end with the same length, and one path of actions without slack.
function critical(graph, table, times, order = orderOf(graph)) {
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
  const last = prev[chain[chain.length - 1]], after = last < 0 ? "" : `, which ran after ${nameOf(actions[last])}`;
  const far = said.length > 4 ? [said.slice(0, 3), `, and so on back to ${said[said.length - 1]}`] : [said, ""];
  return `${nameOf(actions[i])} waits for ${far[0].join(", which waits for ")}${far[1]}${after}`;
}

// ---- building: one move after the other. A move starts as soon as it can, so it never changes an earlier one.

class Build {
  constructor(site) {
    Object.assign(this, { limit: Infinity, kinds: "FB", ...site });
    this.stages = this.home.length;
    this.letter = [...this.kinds].filter((kind) => "BI".includes(kind)).join(" or ");
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
    if (onRank !== undefined && onRank !== rank) return `${name}: stage ${stage} is on rank ${rank}, not on ${onRank}`;
    if (this.has(stage, kind, microbatch)) return `${name} is placed already`;
    if (!this.kinds.includes(kind)) return `${name}: here a schedule is made of ${[...this.kinds].join(", ")}`;
    const needs = (other, what) => {
      const who = (one) => (stages > this.ranks ? `stage ${one}` : `rank ${home[one]}`), own = other === stage;
      const where = `${stages > this.ranks ? "in" : "on"} ${who(stage)}`;
      return `${kind} of micro-batch ${microbatch} ${where} needs ${own ? "its own" : `${who(other)}'s`} ${what} first`;
    };
    if (kind === "W") {
      if (this.has(stage, "B", microbatch)) return `${name}: ${stage}B${microbatch} is the weight gradient too`;
      return this.has(stage, "I", microbatch) ? "" : needs(stage, "I");
    }
    if (kind === "F") {
      if (this.up[microbatch] < stage) return needs(stage - 1, "F");
      if (this.now[rank] < this.limitOf(rank)) return "";
      const frees = [...this.kinds].filter((one) => CHANGE[one] < 0).join(" or ");
      const holds = `${this.now[rank]} activation${this.now[rank] === 1 ? "" : "s"}`;
      return `rank ${rank} holds ${holds}, its limit; a ${frees} must free one first`;
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

  // Says in one line why the limit lets the schedule not be finished any more, or "".
  // Exact, without a search. A micro-batch frees nothing before it has reached the last stage; from there on all of its
  // backward passes need no memory. So what is under way can finish only if one of it can go all the way up within what
  // is free, and it does no harm to let that one go first: as the banker's algorithm does (Dijkstra 1965).
  deadEnd() {
    const { up, stages, microbatches, ranks, home } = this, limits = this.rows.map((_, rank) => this.limitOf(rank));
    if (limits.every((one) => one === Infinity)) return "";
    const parts = (from, to) => { // of each rank's stages, how many are in this range
      const counts = Array(ranks).fill(0);
      for (let stage = from; stage < to; stage++) counts[home[stage]]++;
      return counts;
    };
    let left = [...up.keys()].filter((m) => up[m] > 0 && up[m] < stages), free = limits;
    for (const m of left) free = parts(0, up[m]).map((some, rank) => free[rank] - some);
    const lacks = (m) => parts(up[m], stages).findIndex((some, rank) => some > free[rank]);
    for (let k; (k = left.findIndex((m) => lacks(m) < 0)) >= 0; left.splice(k, 1)) {
      free = parts(0, up[left[k]]).map((some, rank) => free[rank] + some);
    }
    if (!left.length) left = [...up.keys()].filter((m) => !up[m] && lacks(m) >= 0);
    if (!left.length) return "";
    const rank = lacks(left[0]), more = parts(up[left[0]], stages)[rank], most = Math.max(0, free[rank]);
    const needs = `it still needs ${more} more on rank ${rank}, where ${most} of ${limits[rank]} activations can become free`;
    const undo = this.moves.length ? "; undo" : ""; // else the limit itself is too small
    return `dead end: micro-batch ${left[0]} cannot reach the last stage any more: ${needs}${undo}`;
  }

  // The next micro-batch of each stage and kind on a rank: what a page offers. `reason` says why it may not be placed.
  next(rank) {
    const offers = [];
    this.home.forEach((home, stage) => {
      if (home !== rank) return;
      for (const kind of this.kinds) {
        const other = { F: 1, B: 6, I: 6, W: 10 }[kind]; // what has run where there is no such action any more
        let first = null;
        for (let microbatch = 0; microbatch < this.microbatches; microbatch++) {
          if (this.bits(stage, microbatch) & other) continue;
          const action = { stage, kind, microbatch }, reason = this.why(action);
          if (!reason || !first) first = { action, reason };
          if (!reason) break;
        }
        if (first) offers.push(first);
      }
    });
    return offers;
  }

  // Places whole rows, taking turns; returns "" or why the rest cannot be placed.
  replay(rows) {
    const at = rows.map(() => 0);
    for (let moved = true; moved;) {
      moved = false;
      rows.forEach((row, rank) => {
        for (; at[rank] < row.length && !this.place(row[at[rank]], rank); at[rank]++) moved = true;
      });
    }
    const stuck = rows.findIndex((row, rank) => at[rank] < row.length);
    return stuck < 0 ? "" : this.why(rows[stuck][at[stuck]], stuck);
  }
}
