// The schedule builder: a grid of ranks and time on a canvas. Ready actions are ghosts; click, tap or keys place one.
// engine.js, which stands before it in one script, knows the rules, the times and the names. A notebook's widget renders
// it with a model, a page with data: { levels, level, text, address } (address: the page's own fragment is the state).

const ROW = 54, STRIP = 18, STEP = ROW + STRIP + 12, NAMES = 90, TOP = 24, AXIS = 26; // pixels; ROW holds two ghosts
const LEAST = 18, WIDEST = 64, GHOST = 32; // pixels across: of the shortest box until the longest is WIDEST; of a ghost
const FILL = { F: "#56B4E9", B: "#E69F00", I: "#F0E442", W: "#009E73" };
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const INK = "#111", BRAND = "#2f8de4", ALARM = "#D55E00", HELD = "#9a7bb0"; // on light paper and on dark
const KEYS = "Keys: ↑ ↓ choose a rank; F, B, I, W or 1 to 9 place; ← → read what stands and what idles; U undo, R redo, " +
  "C critical path, H hint.";
const BEGIN = "Click or tap a dashed box. By keys: Tab to the grid, then F.", TIMES = ["F", "I", "W", "message"];
const MOST = { ranks: 16, microbatches: 64, per: 4 }, LONGEST_ADDRESS = 20000, LATER_MS = [0, 100, 300, 1000, 3000];

const ms = (ns) => `${Number((ns / 1e6).toFixed(2))} ms`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const wholeOf = (text, most, other) => (/^\d{1,6}$/.test(text) && +text >= 1 && +text <= most ? +text : other);
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function make(parent, tag, properties = {}, attributes = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

// Returns a colour with a share of white in it: ghosts, and later stages of a rank.
function lighter(hex, share) {
  const part = (at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * (1 - share) + 255 * share);
  return `rgb(${part(1)} ${part(3)} ${part(5)})`;
}

// A pipeline of any size, which is no level.
function ownSite({ ranks = 4, microbatches = 8, per = 1, kinds = "FB", home }) {
  home ??= Array.from({ length: ranks * per }, (_, stage) => stage % ranks);
  const says = `${plural(ranks, "rank")}, ${plural(home.length, "stage")}, ${plural(microbatches, "micro-batch")}`.replace(/batchs$/, "batches");
  return { id: "own", title: "Your own pipeline", says: `${says}: build what you like.`, hint: "Run a backward as soon as it is ready.",
    ranks, microbatches, kinds, home, times: { F: 1, I: 1, W: 1, message: 0 } };
}

const timesOf = ({ times }) => structuredClone({ message: 0, ...times });

// The site that a schedule's text needs. Throws where it is too large, or where a stage has no rank.
function siteOf(rows) {
  const all = rows.flat(), most = (name) => Math.max(0, ...all.map((one) => one[name])) + 1, ranks = rows.length;
  const stages = all.length ? most("stage") : ranks, microbatches = most("microbatch"), home = Array(stages).fill(all.length ? -1 : 0);
  if (ranks > MOST.ranks || microbatches > MOST.microbatches || stages > MOST.per * ranks) {
    throw new Error(`the text has ${plural(ranks, "rank")}, ${plural(stages, "stage")}, micro-batches up to ${microbatches - 1}; here are up to 16 ranks of 4 stages, and 64 micro-batches`);
  }
  rows.forEach((row, rank) => row.forEach(({ stage }) => { home[stage] = rank; }));
  if (home.includes(-1)) throw new Error(`no line runs stage ${home.indexOf(-1)}`);
  const has = (kind) => all.some((one) => one.kind === kind), split = has("I") || has("W");
  return ownSite({ ranks, microbatches, kinds: !split ? "FB" : has("B") ? "FBIW" : "FIW", home: all.length ? home : undefined });
}

class ScheduleBuilder {
  constructor(root, data, model) {
    Object.assign(this, { model, levels: data.levels, address: data.address, kept: new Map(), aim: null });
    const { hash } = location, asked = hash.length > 1 && (hash.includes("level=") || !document.getElementById(hash.slice(1)));
    root.replaceChildren();
    this.lay(root);
    this.listen();
    this.start(typeof data.level === "object" && data.level ? ownSite(data.level) : this.levels.find(({ id }) => id === `${data.level}`) ?? this.levels[0], BEGIN);
    if (this.address && asked) this.open(hash);
    else if (data.text) this.openText(data.text);
  }

  // ---- the page's parts

  lay(parent) {
    const entry = (kind, words, style) => `<li><i style="${style}">${kind}</i>${words}</li>`, legend = KINDS.map((kind) => entry(kind, WORDS[kind], `background:${FILL[kind]}`));
    const root = this.root = make(parent, "section", { className: "distlab-builder", innerHTML: `
      <nav class="levels" aria-label="levels"></nav><h4></h4><p class="says"></p><p class="score"></p>
      <div class="scroll"><div class="wide"><canvas tabindex="0" role="application" aria-roledescription="schedule"></canvas></div></div>
      <p class="line" role="status" aria-live="polite"></p><div class="chips" role="group" aria-label="actions of the chosen rank"></div>
      <div class="bar"></div><div class="report" hidden></div>
      <details><summary>Times and memory</summary><div class="sliders"></div></details>
      <details><summary>As text</summary><textarea rows="5" spellcheck="false" aria-label="schedule, one line per rank"></textarea><div class="read"></div></details>
      <ul class="legend">${legend.join("")}${entry("", "ready now", "border:1.5px dashed #888")}${entry("", "under each rank: the activations that it holds", `background:${HELD}`)}</ul>
      <p class="keys">${KEYS}</p>` }, { "aria-label": "pipeline schedule builder", "data-lm-suppress-shortcuts": true }); // else JupyterLab takes the keys
    for (const name of ["levels", "says", "score", "scroll", "wide", "line", "chips", "bar", "report", "sliders", "read", "keys"]) this[name === "levels" ? "tabs" : name] = root.querySelector(`.${name}`);
    [this.title, this.canvas, this.area] = ["h4", "canvas", "textarea"].map((tag) => root.querySelector(tag));
    const button = (textContent, onclick, bar = this.bar) => make(bar, "button", { type: "button", textContent, onclick });
    this.buttons = { undo: button("Undo", () => this.undo()), redo: button("Redo", () => this.redo()) };
    button("Start over", () => this.start(this.site, BEGIN));
    button("Hint", () => this.tell(this.site.hint));
    this.buttons.path = button("Critical path", () => this.togglePath());
    button("Run on real ranks", () => this.runOnRanks());
    button("Copy text", () => this.copy(print(this.build.rows), "the text: one line per rank"));
    if (this.address) button("Copy link", () => this.copy(location.href.split("#")[0] + this.fragment(), "the address of this schedule"));
    button("Read this text", () => this.openText(this.area.value), this.read);
  }

  listen() {
    this.ended = new AbortController(); // ends what listens beyond the builder's own elements
    const on = (target, name, handler) => target.addEventListener(name, handler, { signal: this.ended.signal });
    on(this.canvas, "click", (event) => this.click(event));
    on(this.canvas, "keydown", (event) => this.key(event));
    on(this.canvas, "pointermove", (event) => this.point(this.at(event)));
    on(this.canvas, "pointerleave", () => this.point(null));
    on(this.scroll, "scroll", () => this.repaint());
    on(this.root, "transitionend", () => this.repaint()); // the colour of letters has changed: see the CSS
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.repaint());
    on(window, "storage", () => this.describe()); // a star that was won in a different tab
    on(window, "hashchange", () => { if (this.address && location.hash !== this.own && location.hash.includes("level=")) this.open(location.hash); });
    const resized = new ResizeObserver(() => this.repaint());
    resized.observe(this.scroll);
    const themed = new MutationObserver(() => LATER_MS.forEach((later) => setTimeout(() => this.repaint(), later)));
    themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-theme"] });
    on(this.ended.signal, "abort", () => [resized, themed].forEach((one) => one.disconnect()));
    this.model?.on("change:text", () => { if (this.model.get("text") !== print(this.build.rows)) this.openText(this.model.get("text")); });
    this.model?.on("msg:custom", (message) => this.answer(message));
  }

  // ---- state: a level, its times, what is placed; in the address, in a text

  open(hash) {
    const asked = Object.fromEntries(hash.length > LONGEST_ADDRESS ? [] : hash.slice(1).split("&").map((part) => part.split("=")));
    const { level, p = "4", m = "8", v = "1", k = "FB", s } = asked, found = this.levels.find(({ id }) => id === level) ?? this.levels[0];
    const size = { ranks: wholeOf(p, MOST.ranks, 4), microbatches: wholeOf(m, MOST.microbatches, 8), per: wholeOf(v, MOST.per, 1) };
    let problem = found.id === level || level === "own" ? "" : `The address ${level === undefined && hash.length > LONGEST_ADDRESS ? "is too long for a schedule" : "names no level"}; here is level 1.`;
    if (level === "own" && !same(Object.values(size).map(String), [p, m, v])) {
      problem = `Here are 1 to 16 ranks, 1 to 64 micro-batches, 1 to 4 stages per rank; shown are ${Object.values(size).join(", ")}.`;
    }
    this.start(level === "own" ? ownSite({ ...size, kinds: ["FB", "FIW", "FBIW"].includes(k) ? k : "FB" }) : found, "", asked);
    if (s) {
      this.given = this.stored(`at-${this.site.id}`) !== hash; // one's own address, read again, may still win its star
      try {
        const reason = this.load(parse(decodeURIComponent(s).replaceAll(";", "\n")));
        if (reason) problem = `The address's schedule stops here: ${reason}.`;
      } catch (error) { problem = `The address holds no schedule: ${error.message}`; }
    }
    this.after(problem || (this.build.moves.length ? undefined : BEGIN));
  }

  // Begins a site anew; a different site, or an address, brings its own times and limit.
  start(site, said, asked) {
    if (site !== this.site || asked) {
      const numbers = asked?.t?.split(",").map(Number) ?? [], stages = site.times.slow ? site.home.length : 0;
      const right = numbers.length === 4 + stages && numbers.every((one) => one >= 0 && one <= 8);
      this.times = timesOf(site);
      if (right) TIMES.forEach((name, at) => { this.times[name] = numbers[at]; });
      if (right && stages) this.times.slow = numbers.slice(4);
      this.limit = wholeOf(asked?.limit ?? "", 1024, site.limit);
      this.site = site;
    }
    this.build = new Build({ ...site, limit: this.limit });
    Object.assign(this, { rank: 0, redoable: [], given: false });
    this.drawSliders();
    this.describe();
    this.after(said);
  }

  // Whether times and limit are the level's own: else there is no star.
  get usual() { return same([this.times, this.limit], [timesOf(this.site), this.site.limit]); }

  describe() {
    const own = this.site.id === "own" ? this.site : ownSite({});
    this.tabs.replaceChildren();
    for (const level of [...this.levels, own]) {
      const best = Number(this.stored(level.id)), mark = !best || level === own ? "" : best <= level.par ? " ★" : " ✓";
      const words = level === own ? own.title : `level ${level.id}: ${level.title}${{ "": "", " ★": ", star", " ✓": ", solved" }[mark]}`;
      make(this.tabs, "button", { type: "button", textContent: (level === own ? "your own" : level.id) + mark, onclick: () => this.start(level, BEGIN) },
        { "aria-label": words, "aria-current": level.id === this.site.id });
    }
    this.title.textContent = `${this.site === own ? "" : `Level ${this.site.id}: `}${this.site.title}`;
    this.says.textContent = this.site.says;
  }

  // Places a schedule of this site's form; returns why it stops, or "".
  load(rows) {
    const { ranks } = this.site;
    if (rows.length !== ranks) throw new Error(`${plural(rows.length, "line")} for ${plural(ranks, "rank")}; write one line per rank`);
    this.build.clear();
    this.redoable = [];
    return this.build.replay(computations(rows));
  }

  // Shows a text: in the site that stands here where it fits, else in one of its own.
  openText(text) {
    const { site } = this;
    try {
      const rows = computations(parse(text)), whole = siteOf(rows);
      const fits = rows.length === site.ranks && whole.microbatches <= site.microbatches && [...whole.kinds].every((kind) => site.kinds.includes(kind))
        && rows.every((row, rank) => row.every(({ stage }) => site.home[stage] === rank));
      if (!fits || (site.id === "own" && rows.flat().length && !same(whole, site))) this.start(whole, "");
      const reason = this.load(rows);
      this.given = true;
      this.after(reason ? `Read up to here: ${reason}.` : "Read.");
    } catch (error) { this.tell(error.message); }
  }

  fragment() {
    const { site, build, times } = this, parts = [`level=${site.id}`];
    if (site.id === "own") parts.push(`p=${site.ranks}`, `m=${site.microbatches}`, `v=${Math.ceil(site.home.length / site.ranks)}`, `k=${site.kinds}`);
    if (!this.usual) parts.push(`limit=${this.limit ?? 1024}`, `t=${[...TIMES.map((name) => times[name]), ...(times.slow ?? [])]}`);
    if (build.moves.length) parts.push(`s=${print(build.rows).replaceAll("\n", ";")}`);
    return `#${parts.join("&")}`;
  }

  save() {
    clearTimeout(this.saving); // an address may change some hundred times a minute at most
    this.saving = setTimeout(() => {
      const text = print(this.build.rows);
      if (this.area !== document.activeElement) this.area.value = text;
      this.model?.set({ text, times: this.times });
      this.model?.save_changes();
      if (!this.address) return;
      this.own = this.fragment();
      if (!this.given) this.store(`at-${this.site.id}`, this.own);
      try { history.replaceState(null, "", this.own); } catch { /* an address that cannot be written, as in a frame */ }
    }, 120);
  }

  stored(name) { try { return localStorage.getItem(`distlab-builder-${name}`); } catch { return this.kept.get(name); } }

  // Keeps a value in the browser; returns false where that is forbidden, and it lasts as long as the page.
  store(name, value) { try { localStorage.setItem(`distlab-builder-${name}`, value); return true; } catch { this.kept.set(name, value); return false; } }

  async copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      this.tell(`Copied ${what}.`);
    } catch {
      this.area.closest("details").open = true;
      this.area.value = text;
      this.area.select();
      this.tell("Copying is not allowed here; it is selected below.");
    }
  }

  // ---- moves

  place(action) {
    const began = performance.now(), reason = this.build.place(action);
    if (reason) return this.tell(reason);
    this.redoable = [];
    this.rank = this.build.home[action.stage];
    this.after();
    this.canvas.dataset.moveMs = (performance.now() - began).toFixed(2);
  }

  undo() {
    const action = this.build.undo();
    if (!action) return this.tell("Nothing to undo.");
    this.redoable.push(action);
    this.after(`Took back ${nameOf(action)}.`);
  }

  redo() {
    const action = this.redoable.pop();
    if (!action) return this.tell("Nothing to redo.");
    this.after(this.build.place(action) || `Placed ${nameOf(action)} again.`);
  }

  // After any change: works out what stands, says it and shows it.
  after(said) {
    const { build } = this, last = build.moves[build.moves.length - 1];
    this.aim = null;
    this.cursor = -1;
    this.solve();
    const dead = build.deadEnd();
    if (build.finished) this.finish(said);
    else this.tell([said ?? (last ? this.words(this.graph.actions.findIndex((one) => nameOf(one) === nameOf(last))) : BEGIN), dead && `A ${dead}.`].filter(Boolean).join(" "));
    this.refresh();
  }

  finish(said) {
    const { sum: { length, bubble }, site, par, build } = this, level = site.id !== "own", won = level && this.usual && !this.given;
    const best = Number(this.stored(site.id)), kept = !won || (best && best <= length / 1e6) || this.store(site.id, length / 1e6);
    const { is, like } = recognise(build.rows, build.home), named = is.length ? is : like;
    const judged = !par ? "" : length < par ? `, below par (${ms(par)})!` : length === par ? ", par!" : `; par is ${ms(par)}.`;
    this.tell([
      said, `Done in ${ms(length)}${judged || "."} ${percent(bubble)} idle, a rank holds at most ${Math.max(...peaks(build.rows))}.`,
      named.length ? `This is ${named.join(" and ")}${is.length ? "" : " with its W at other places"}.` : "This order has no name of its own.",
      level && this.given ? "It was read, not built: start over to win the star." : "",
      kept ? "" : "This browser forbids to keep stars: this one lasts until the page closes.",
    ].filter(Boolean).join(" "));
    this.describe();
  }

  togglePath() {
    this.showsPath = !this.showsPath;
    this.buttons.path.setAttribute("aria-pressed", this.showsPath);
    const names = this.critical.path.map((i) => nameOf(this.graph.actions[i]));
    if (names.length > 14) names.splice(6, names.length - 12, "…");
    this.tell(!this.showsPath ? "Critical path hidden." : `Critical path: ${names.join(" → ") || "nothing is placed yet"}.`);
    this.repaint();
  }

  // ---- real ranks

  runOnRanks() {
    const { build, model } = this, text = print(build.rows), layers = build.stages > 8 ? ` --layers ${build.stages}` : "";
    if (!build.finished) return this.tell("A schedule runs on real ranks when all of its actions stand.");
    this.report.hidden = false;
    this.report.replaceChildren(model ? "The same in a terminal: save " : "It runs on real ranks where distlab is installed: save ");
    make(this.report, "a", { download: "my_order.txt", href: `data:text/plain;charset=utf-8,${encodeURIComponent(`${text}\n`)}`, textContent: "my_order.txt" });
    this.report.append(", then ");
    make(this.report, "code", { textContent: `distlab lab 09 --ranks ${build.ranks} --schedule my_order.txt${layers}` });
    if (!model) return this.tell("The line below runs it on real ranks.");
    model.send({ run: text });
    this.tell(`Asked the kernel to run it on ${plural(build.ranks, "real rank")}.`);
    this.patience = setTimeout(() => this.tell("The kernel does not answer: it is busy, or gone. What you built stays, and runs in a terminal as below."), 5000);
  }

  // What the kernel says of a run: that it has begun; how it went, with a picture; or why not.
  answer({ began, said, picture, title }) {
    clearTimeout(this.patience);
    this.tell(began ?? said);
    if (began) return;
    this.report.replaceChildren();
    if (picture) make(this.report, "img", { src: `data:image/png;base64,${picture}`, alt: title });
    make(this.report, "p", { textContent: said });
  }

  // ---- pointer and keys

  // What lies under a pointer: a ghost, a placed action, idle time, or a rank.
  at({ offsetX: x, offsetY: y }) {
    const ghost = this.ghosts.find((one) => x >= one.x && x <= one.x + one.w && y >= one.y && y <= one.y + one.h);
    const rank = Math.floor((y - TOP) / STEP), time = (x - NAMES + this.scroll.scrollLeft) / this.scale;
    if (ghost) return { rank: ghost.rank, ghost };
    if (rank < 0 || rank >= this.build.ranks || y > TOP + rank * STEP + ROW + STRIP) return null;
    return { rank, ...(x >= NAMES && this.items(rank).find(({ from, to }) => time >= from && time < to)) };
  }

  // What a rank's row shows, from the left: actions, and idle time with the action that it ends with (-1 for none).
  items(rank) {
    const { starts, times: { start, end } } = this.solved, out = [];
    let free = 0;
    this.build.rows[rank].forEach((_, at) => {
      const i = starts[rank] + at;
      if (start[i] > free) out.push({ idle: i, from: free, to: start[i] });
      out.push({ action: i, from: start[i], to: (free = end[i]) });
    });
    if (this.build.finished && free < this.sum.length) out.push({ idle: -1, from: free, to: this.sum.length });
    return out;
  }

  click(event) {
    const aim = this.at(event);
    this.canvas.focus({ preventScroll: true });
    if (!aim) return;
    this.rank = aim.rank;
    const ready = this.offers[aim.rank].filter(({ reason }) => !reason);
    if (aim.ghost) return this.place(aim.ghost.action);
    if (aim.from === undefined && ready.length === 1) return this.place(ready[0].action);
    this.tell(this.wordsOf(aim));
    this.refresh();
  }

  point(aim) {
    if (same(aim, this.aim)) return;
    this.aim = aim;
    this.canvas.style.cursor = aim?.ghost ? "pointer" : "default";
    this.line.textContent = (aim && this.wordsOf(aim)) || this.told;
    this.repaint();
  }

  wordsOfRank(rank = this.rank) {
    const offers = this.offers[rank], ready = offers.filter(({ reason }) => !reason).map(({ action }) => nameOf(action));
    return `rank ${rank}: ${ready.length ? `can run ${ready.join(" or ")}` : offers[0]?.reason ?? "nothing left to do"}`;
  }

  wordsOf({ ghost, action, idle, rank }) {
    const { graph, sum, solved: { times } } = this;
    if (ghost) return `${nameOf(ghost.action)} would run from ${ms(ghost.start)} to ${ms(ghost.start + ghost.took)}`;
    if (action !== undefined) return this.words(action);
    if (idle === undefined) return this.wordsOfRank(rank);
    if (idle >= 0) return `rank ${rank} idles: ${whyIdle(graph, this.table, times, idle)}`;
    const last = graph.actions[times.end.indexOf(sum.length)];
    return `rank ${rank} has nothing left to do; the step ends with ${nameOf(last)} on rank ${last.rank}`;
  }

  words(i) {
    const { graph: { actions, need }, solved: { times } } = this, one = actions[i], cause = causeOf(this.graph, this.table, times, i);
    const why = cause < 0 ? "the first" : cause === need[i] ? `as soon as ${nameOf(actions[cause])} of rank ${actions[cause].rank} was there` : `right after ${nameOf(actions[cause])}`;
    const slack = this.critical.slack[i] ? `; could end ${ms(this.critical.slack[i])} later` : "";
    return `${nameOf(one)}: ${WORDS[one.kind]} of micro-batch ${one.microbatch}, stage ${one.stage}; ${ms(times.start[i])} to ${ms(times.end[i])}, ${why}${slack}`;
  }

  key(event) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, { ranks, kinds } = this.build;
    if (event.altKey || ((event.ctrlKey || event.metaKey) && key !== "z")) return;
    const choose = (by) => {
      this.rank = (this.rank + by + ranks) % ranks;
      this.aim = null;
      this.cursor = -1;
      this.tell(this.wordsOfRank());
      this.refresh();
    };
    const read = (by) => {
      const items = this.items(this.rank);
      if (!items.length) return this.tell(`rank ${this.rank} has run nothing yet`);
      this.cursor = Math.min(Math.max(this.cursor < 0 ? items.length - 1 : this.cursor + by, 0), items.length - 1);
      this.aim = { rank: this.rank, ...items[this.cursor] };
      this.tell(this.wordsOf(this.aim));
      this.show(this.aim.from, this.aim.to);
      this.repaint();
    };
    const acts = { ArrowUp: () => choose(-1), ArrowDown: () => choose(1), ArrowLeft: () => read(-1), ArrowRight: () => read(1),
      u: () => this.undo(), z: () => this.undo(), r: () => this.redo(), c: () => this.togglePath(), h: () => this.tell(this.site.hint),
      " ": () => this.press(0), Enter: () => this.press(0) };
    for (const kind of kinds) acts[kind.toLowerCase()] = () => this.press(0, kind);
    for (let n = 1; n < 10; n++) acts[n] = () => this.press(n - 1);
    if (!acts[key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[key]();
  }

  // Places the n-th ready action of the chosen rank, or the ready one of a kind; says why there is none.
  press(n, kind) {
    const offers = this.offers[this.rank].filter(({ action }) => !kind || action.kind === kind), ready = offers.filter(({ reason }) => !reason);
    const chosen = ready.sort((a, b) => this.startOf(a.action) - this.startOf(b.action))[n];
    if (chosen) this.place(chosen.action);
    else this.tell(ready.length ? `rank ${this.rank} has no action ${n + 1}` : offers[0]?.reason ?? `rank ${this.rank} has no ${kind ?? "action"} left`);
  }

  tell(text) { this.line.textContent = this.told = text; }

  // ---- what stands, worked out after each change

  solve() {
    const { build, site, times } = this, graph = this.graph = graphOf(build.rows), { order } = orderOf(graph), key = JSON.stringify([site, times, this.limit]);
    this.table = tableOf(times, build.stages);
    const ran = run(graph, this.table, order), free = build.rows.map(() => 0), starts = build.rows.map(() => 0); // of a rank's actions in the graph
    graph.actions.forEach(({ rank, step }, i) => {
      free[rank] = ran.end[i];
      if (!step) starts[rank] = i;
    });
    this.solved = { times: ran, order, free, starts };
    this.sum = summary(graph, ran);
    if (this.parKey !== key) this.par = this.usual && site.par ? site.par * 1e6 : parOf({ ...site, limit: this.limit }, times)?.length ?? 0;
    this.parKey = key;
    this.found = null;
    this.offers = build.rows.map((_, rank) => build.next(rank));
  }

  get critical() { return (this.found ??= critical(this.graph, this.table, this.solved.times, this.solved.order)); }

  // When an action could start that is not placed yet.
  startOf({ stage, kind, microbatch }) {
    const { graph, build: { home, stages }, solved: { free, times } } = this, last = stage === stages - 1, rank = home[stage];
    const need = kind === "F" ? graph.at(stage - 1, "F", microbatch) : kind === "W" ? graph.at(stage, "B", microbatch) : graph.at(last ? stage : stage + 1, last ? "F" : "B", microbatch);
    const made = graph.actions[need];
    return made ? Math.max(free[rank], times.end[need] + (made.rank === rank ? 0 : this.table.message[made.stage])) : free[rank];
  }

  refresh() {
    const { build, sum, par, rank, solved: { free } } = this, all = 3 * build.stages * build.microbatches, limit = build.limitOf(rank);
    this.score.textContent = [
      build.kinds === "FB" ? `${build.moves.length} of ${(2 * all) / 3} placed` : `${Math.floor((100 * build.total) / all)} % placed`,
      `length ${ms(sum.length)}`, par && `par ${ms(par)}`, `${build.finished ? "bubble" : "idle so far"} ${percent(sum.bubble)}`,
      `most held ${Math.max(...peaks(build.rows))}${Number.isFinite(limit) ? ` of ${limit}` : ""}`,
    ].filter(Boolean).join(" · ");
    this.buttons.undo.disabled = !build.moves.length;
    this.buttons.redo.disabled = !this.redoable.length;
    this.canvas.setAttribute("aria-label", `${plural(build.ranks, "rank")}, ${plural(build.moves.length, "action")} placed; rank ${rank} is chosen`);
    this.drawChips();
    this.lengthen();
    this.show(free[rank], free[rank] + GHOST / (this.scale || 1));
    this.repaint();
    this.save();
  }

  drawChips() {
    this.chips.replaceChildren(`rank ${this.rank}: `);
    for (const { action, reason } of this.offers[this.rank]) {
      const textContent = `${action.kind}${action.microbatch}${this.build.stages > this.build.ranks ? ` of stage ${action.stage}` : ""}`;
      const chip = make(this.chips, "button", { type: "button", textContent, title: reason || `place ${nameOf(action)}`, className: reason ? "not" : "" },
        { "aria-label": `${WORDS[action.kind]} of micro-batch ${action.microbatch}, stage ${action.stage}${reason && `: not yet, ${reason}`}`, "aria-disabled": Boolean(reason) });
      if (!reason) chip.style.borderColor = FILL[action.kind];
      chip.onclick = () => { this.place(action); this.chips.querySelector("button")?.focus({ preventScroll: true }); };
    }
    if (!this.offers[this.rank].length) this.chips.append("nothing left to do");
  }

  drawSliders() {
    const { times, site, sliders } = this, per = site.home.length / site.ranks, most = Math.ceil(site.microbatches * per);
    sliders.replaceChildren();
    const slider = (words, value, min, max, set) => {
      const row = make(sliders, "label", { textContent: words }), now = Number(value.toFixed(2));
      const input = make(row, "input", { type: "range", min, max: Math.max(max, now), step: max > 8 || min === 1 ? 1 : 0.1, value: now }), shown = make(row, "output", { textContent: now });
      input.oninput = () => {
        const said = set(Number(input.value));
        shown.textContent = input.value;
        this.after(said ?? (this.build.finished ? "" : undefined));
      };
    };
    const time = (name, words) => slider(`${words} (ms)`, times[name], name === "message" ? 0 : 0.1, 4, (value) => { times[name] = value; });
    time("F", "F: forward");
    if (site.kinds === "FB") slider("B: backward (ms)", times.I + times.W, 0.2, 8, (value) => { times.I = times.W = value / 2; });
    else for (const kind of ["I", "W"]) time(kind, `${kind}: ${WORDS[kind]}`);
    time("message", "message");
    times.slow?.forEach((factor, stage) => slider(`stage ${stage}: times longer`, factor, 0.1, 4, (value) => { times.slow[stage] = value; }));
    slider("limit of activations per rank", Math.min(Math.max(...[this.limit ?? most].flat()), most), 1, most, (value) => {
      const holds = Math.max(...peaks(this.build.rows));
      this.limit = this.build.limit = value;
      return holds <= value ? `A rank may hold ${value}.` : `What stands holds ${holds}, more than ${value}: undo until it fits.`;
    });
    if (site.id !== "own") return;
    const size = { ranks: site.ranks, microbatches: site.microbatches, per: Math.ceil(per), kinds: site.kinds }, form = make(sliders, "form");
    form.onsubmit = (event) => { event.preventDefault(); this.start(ownSite(size), BEGIN); };
    for (const [name, textContent] of [["ranks", "ranks"], ["microbatches", "micro-batches"], ["per", "stages per rank"]]) {
      make(make(form, "label", { textContent }), "input", { type: "number", min: 1, max: MOST[name], value: size[name], oninput: ({ target }) => { size[name] = wholeOf(target.value, MOST[name], size[name]); } });
    }
    const kinds = make(make(form, "label", { textContent: "backward" }), "select", { oninput: ({ target }) => { size.kinds = target.value; } });
    for (const [value, textContent] of [["FB", "B"], ["FIW", "I and W"], ["FBIW", "B, or I and W"]]) make(kinds, "option", { value, textContent, selected: value === size.kinds });
    make(form, "button", { textContent: "New grid" });
  }

  // ---- drawing

  // Sets the scale and the room across, for what stands and what may come next.
  lengthen() {
    const { build, table, sum, par, wide } = this, spans = [...build.kinds].flatMap((kind) => table[kind]).filter(Boolean);
    const shortest = Math.min(...spans, 1e9), most = Math.max(...spans, 1);
    this.width = this.scroll.clientWidth;
    this.height = TOP + build.ranks * STEP + AXIS;
    this.longest = Math.max(par * 1.04, sum.length * 1.02 + 2 * shortest, 4 * shortest);
    this.scale = Math.max((this.width - NAMES - 12) / this.longest, Math.min(LEAST / shortest, WIDEST / most));
    wide.style.width = `${Math.max(this.width, NAMES + this.longest * this.scale + GHOST * 2)}px`;
  }

  // Scrolls to a range of time where it is out of sight.
  show(from, to) {
    const [left, right] = [from * this.scale, to * this.scale + 8], room = this.width - NAMES, view = this.scroll;
    if (right > view.scrollLeft + room) view.scrollLeft = right - room / 2;
    else if (left < view.scrollLeft) view.scrollLeft = Math.max(0, left - room / 2);
  }

  // Paints at once, and with the next frame what changed before it.
  repaint() {
    this.stale = Boolean(this.frame);
    if (this.stale) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; if (this.stale) this.paint(); });
    this.paint();
  }

  paint() {
    if (this.width !== this.scroll.clientWidth) this.lengthen();
    const { canvas, width, height, build, root } = this, ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    const size = [Math.round(width * ratio), Math.round(height * ratio)], { color: ink, fontFamily } = getComputedStyle(root);
    this.ghosts = [];
    if (!width) return;
    if (!same(size, [canvas.width, canvas.height])) [canvas.width, canvas.height] = size;
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const pen = { context, ink, faint: getComputedStyle(this.keys).color, x: (ns) => NAMES + ns * this.scale - this.scroll.scrollLeft };
    pen.font = (px, weight = "") => { context.font = `${weight} ${px}px ${fontFamily}`; };
    pen.text = (text, x, y, align = "center") => { context.textAlign = align; context.fillText(text, x, y); };
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(NAMES, 0, width - NAMES, height);
    context.clip();
    const marked = new Set(), path = new Set(this.showsPath ? this.critical.path : []); // marked: what the one aimed at waited for
    for (let i = this.aim?.action ?? this.aim?.idle ?? -1; i >= 0; i = causeOf(this.graph, this.table, this.solved.times, i)) marked.add(i);
    for (let rank = 0; rank < build.ranks; rank++) this.paintRank(pen, rank, TOP + rank * STEP, marked, path);
    this.paintAxis(pen);
    context.restore();
    for (let rank = 0; rank < build.ranks; rank++) this.paintName(pen, rank, TOP + rank * STEP);
  }

  paintRank(pen, rank, y, marked, path) {
    const { context, x } = pen, { build, aim, width, solved: { times: { start, end }, starts } } = this, per = build.stages / build.ranks, borders = [];
    const back = (colour, left, top, w, h) => { context.fillStyle = colour; context.fillRect(left, top, w, h); };
    back(rank === this.rank ? "rgb(47 141 228 / 16%)" : "rgb(128 128 128 / 13%)", NAMES, y, width, ROW);
    back("rgb(128 128 128 / 7%)", NAMES, y + ROW, width, STRIP);
    if (aim?.rank === rank && aim.idle !== undefined) back("rgb(213 94 0 / 22%)", x(aim.from), y, x(aim.to) - x(aim.from), ROW);
    build.rows[rank].forEach((one, at) => {
      const i = starts[rank] + at, left = x(start[i]), w = Math.max(x(end[i]) - left - 1, 1);
      if (left > width || left + w < NAMES) return;
      const turn = per > 1 ? build.home.slice(0, one.stage).filter((home) => home === rank).length / per : 0;
      back(lighter(FILL[one.kind], 0.6 * turn), left, y + 1, w, ROW - 2);
      const border = this.cursor >= 0 && aim?.action === i ? BRAND : marked.has(i) ? ALARM : path.has(i) ? pen.ink : "";
      if (border) borders.push([border, left + 1.5, y + 2.5, w - 3, ROW - 5]);
      this.label(pen, one, left, w, y + ROW / 2);
    });
    context.lineWidth = 3;
    for (const [colour, ...box] of borders) {
      context.strokeStyle = colour;
      context.strokeRect(...box);
    }
    this.paintHeld(rank, y + ROW + STRIP, (from, to, tall) => back(HELD, x(from), y + ROW + STRIP, x(to) - x(from), -tall));
    this.paintGhosts(pen, rank, y + 1);
  }

  // Writes an action's name into a box, or its micro-batch alone where there is less room.
  label(pen, one, left, w, middle) {
    const name = this.build.stages > this.build.ranks ? nameOf(one) : `${one.kind}${one.microbatch}`, text = w > 7.6 * name.length + 4 ? name : `${one.microbatch}`;
    if (w < 5.6 * text.length) return;
    pen.font(w > 7.6 * text.length + 3 ? 13 : 10);
    pen.context.fillStyle = INK;
    pen.text(text, left + w / 2, middle);
  }

  // A rank's activations over time: F takes one at its start, B or W frees one at its end.
  paintHeld(rank, foot, bar) {
    const { build, solved: { times: { start, end }, starts, free } } = this, limit = build.limitOf(rank);
    const most = Number.isFinite(limit) ? limit : Math.max(4, ...peaks(build.rows));
    let now = 0, from = 0;
    const until = (to) => {
      if (now && to > from) bar(from, to, ((STRIP - 2) * Math.min(now, most)) / most);
      from = to;
    };
    build.rows[rank].forEach(({ kind }, at) => {
      if (kind === "I") return;
      until(kind === "F" ? start[starts[rank] + at] : end[starts[rank] + at]);
      now += kind === "F" ? 1 : -1;
    });
    until(free[rank]);
  }

  // What a rank can run now: two in a column, each at least 26 pixels high.
  paintGhosts(pen, rank, y) {
    const { context, x } = pen, ready = this.offers[rank].filter(({ reason }) => !reason).map(({ action }) => ({ rank, action, start: this.startOf(action) }));
    let edge = 0, column = 0;
    ready.sort((a, b) => a.start - b.start).forEach((one, n) => {
      const low = n % 2, took = this.table[one.action.kind][one.action.stage], h = ready.length > 1 ? ROW / 2 - 1 : ROW - 2, top = y + low * (h + 1);
      const left = Math.max(x(one.start), low ? column : edge + 3), w = Math.max(took * this.scale - 2, GHOST);
      if (!low) column = left;
      edge = Math.max(edge, left + w);
      this.ghosts.push({ ...one, took, x: left, y: top, w, h });
      context.fillStyle = lighter(FILL[one.action.kind], same(this.aim?.ghost?.action, one.action) ? 0.25 : 0.72);
      context.strokeStyle = INK;
      context.lineWidth = 1.5;
      context.setLineDash([4, 3]);
      context.fillRect(left, top, w, h);
      context.strokeRect(left + 0.75, top + 0.75, w - 1.5, h - 1.5);
      context.setLineDash([]);
      this.label(pen, one.action, left, w, top + h / 2);
    });
  }

  paintAxis({ context, x, ink, faint, font, text }) {
    const { longest, par, height, width } = this, foot = height - AXIS - 10, tick = [1, 2, 5, 10, 20, 50, 100].find((one) => one * 1e6 * this.scale >= 38) ?? 200;
    font(12);
    context.fillStyle = faint;
    for (let t = 0; t * 1e6 <= longest; t += tick) {
      context.fillRect(x(t * 1e6), foot, 1, 5);
      text(t ? `${t}` : "0 ms", t ? x(t * 1e6) : x(0) + 16, foot + 16);
    }
    if (!par) return;
    context.fillStyle = ink;
    for (let y = TOP - 6; y < foot; y += 9) context.fillRect(x(par), y, 1, 5);
    text(`par ${ms(par)}`, Math.min(x(par), width - 4), 10, "right");
  }

  paintName({ context, ink, faint, font, text }, rank, y) {
    const { build } = this, limit = build.limitOf(rank), now = build.now[rank], full = now >= limit;
    font(13, "bold");
    context.fillStyle = rank === this.rank ? BRAND : ink;
    text(`rank ${rank}`, 4, y + 15, "left");
    font(12, full ? "bold" : "");
    context.fillStyle = full ? ALARM : faint;
    text(`holds ${now}${Number.isFinite(limit) ? ` / ${limit}` : ""}`, 4, y + 36, "left");
    font(12);
    context.fillStyle = faint;
    text(`most ${peaks([build.rows[rank]])[0]}`, 4, y + ROW + STRIP / 2, "left");
  }
}

// Shows a builder: anywidget calls it with a model and el, a page with an element and data. Returns what ends it.
function render({ model, el, element = el, data = model.get("data") }) {
  const builder = new ScheduleBuilder(element, data, model);
  return () => builder.ended.abort();
}

export default { render };
