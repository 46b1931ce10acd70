// The schedule builder: ready actions are ghosts on a grid of ranks and time; click, tap or keys place one. In one script
// before it stand engine.js and known.js (rules, times, names) and grid.js (the canvas). A notebook's widget renders it
// with a model, a page with data: { levels, level, text, address } (address: the page's own fragment is the state).

const KEYS = "Keys: ↑ ↓ choose a rank; F, B, I, W or 1 to 9 place; ← → read what stands and what idles; U undo, R redo, " +
  "C critical path, H hint.";
const BEGIN = "Click or tap a dashed box. By keys: Tab to the grid, then F.", TIMES = ["F", "I", "W", "message"];
const MOST = { ranks: 16, microbatches: 64, per: 4 }, LATER_MS = [0, 100, 300, 1000, 3000];
const LONGEST_ADDRESS = 3 * 8 * MOST.ranks * MOST.per * MOST.microbatches; // F, I and W of all, such as 63W63%2C

function make(parent, tag, properties = {}, attributes = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

// A pipeline of any size, which is no level.
function ownSite({ ranks = 4, microbatches = 8, per = 1, kinds = "FB", home }) {
  home ??= Array.from({ length: ranks * per }, (_, stage) => stage % ranks);
  const says = `${plural(ranks, "rank")}, ${plural(home.length, "stage")}, ${plural(microbatches, "micro-batch")}`.replace(/batchs$/, "batches");
  return { id: "own", title: "Your own pipeline", says: `${says}: build what you like.`, hint: "Run a backward as soon as it is ready.",
    ranks, microbatches, kinds, home, times: { F: 1, I: 1, W: 1, message: 0 } };
}

const timesOf = ({ times }) => structuredClone({ message: 0, ...times });

// The site that a schedule's text needs; a rank without an action gets the first stage that no line runs, or a further
// one. Throws where the site is too large, or where a stage has no rank.
function siteOf(rows) {
  const all = rows.flat(), last = (name) => Math.max(-1, ...all.map((one) => one[name])), ranks = rows.length;
  const stages = last("stage") + 1, microbatches = Math.max(1, last("microbatch") + 1);
  if (ranks > MOST.ranks || microbatches > MOST.microbatches || stages > MOST.per * ranks) {
    throw new Error(`the text has ${plural(ranks, "rank")}, ${plural(stages, "stage")}, micro-batches up to ${microbatches - 1}; here are up to 16 ranks of 4 stages, and 64 micro-batches`);
  }
  const home = Array(stages).fill(-1);
  rows.forEach((row, rank) => row.forEach(({ stage }) => { home[stage] = rank; }));
  rows.forEach((row, rank) => { if (!row.length) home[home.includes(-1) ? home.indexOf(-1) : home.length] = rank; });
  if (home.includes(-1)) throw new Error(`no line runs stage ${home.indexOf(-1)}; number the stages from 0 without gaps`);
  const has = (kind) => all.some((one) => one.kind === kind), split = has("I") || has("W");
  return ownSite({ ranks, microbatches, kinds: !split ? "FB" : has("B") ? "FBIW" : "FIW", home });
}

class ScheduleBuilder extends Grid {
  constructor(root, data, model) {
    super();
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
    const root = this.root = make(parent, "section", { className: "distlab-builder" }, { "aria-label": "pipeline schedule builder" });
    root.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab takes the keys
    this.tabs = make(root, "nav", { className: "levels" }, { "aria-label": "levels" });
    this.title = make(root, "h4");
    this.says = make(root, "p");
    this.score = make(root, "p", { className: "score" });
    this.scroll = make(root, "div", { className: "scroll" });
    this.wide = make(this.scroll, "div");
    this.canvas = make(this.wide, "canvas", { tabIndex: 0 }, { role: "application", "aria-roledescription": "schedule" });
    this.line = make(root, "p", { className: "line" }, { role: "status", "aria-live": "polite" });
    this.chips = make(root, "div", { className: "chips" }, { role: "group", "aria-label": "actions of the chosen rank" });
    this.bar = make(root, "div", { className: "bar" });
    this.report = make(root, "div", { className: "report", hidden: true });
    const [sliders, asText] = ["Times and memory", "As text"].map((textContent) => {
      const details = make(root, "details");
      make(details, "summary", { textContent });
      return details;
    });
    this.sliders = make(sliders, "div", { className: "sliders" });
    this.area = make(asText, "textarea", { rows: 5, spellcheck: false }, { "aria-label": "schedule, one line per rank" });
    const legend = make(root, "ul", { className: "legend" });
    const entry = (textContent, words, style) => {
      const item = make(legend, "li");
      Object.assign(make(item, "i", { textContent }).style, style);
      item.append(words);
    };
    for (const kind of KINDS) entry(kind, WORDS[kind], { background: FILL[kind] });
    entry("", "ready now", { border: "1.5px dashed #888" });
    entry("", "under each rank: the activations that it holds", { background: HELD });
    this.keys = make(root, "p", { className: "keys", textContent: KEYS });
    const button = (textContent, onclick, bar = this.bar) => make(bar, "button", { type: "button", textContent, onclick });
    this.buttons = { undo: button("Undo", () => this.undo()), redo: button("Redo", () => this.redo()) };
    button("Start over", () => this.start(this.site, BEGIN));
    button("Hint", () => this.tell(this.site.hint));
    this.buttons.path = button("Critical path", () => this.togglePath());
    button("Run on real ranks", () => this.runOnRanks());
    button("Copy text", () => this.copy(print(this.build.rows), "the text: one line per rank"));
    if (this.address) button("Copy link", () => this.copy(location.href.split("#")[0] + this.fragment(), "the address of this schedule"));
    button("Read this text", () => this.openText(this.area.value), asText);
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
    const { level, p = "4", m = "8", h = "", k = "FB", s } = asked, found = this.levels.find(({ id }) => id === level) ?? this.levels[0];
    const size = { ranks: wholeOf(p, MOST.ranks, 4), microbatches: wholeOf(m, MOST.microbatches, 8), home: [...h].map((rank) => parseInt(rank, MOST.ranks)) };
    const laid = size.home.length <= MOST.per * size.ranks && same([...new Set(size.home)].sort((a, b) => a - b), [...Array(size.ranks).keys()]);
    if (!laid) delete size.home;
    let problem = found.id === level || level === "own" ? "" : `The address ${level === undefined && hash.length > LONGEST_ADDRESS ? "is too long for a schedule" : "names no level"}; here is level 1.`;
    if (level === "own" && !(same([size.ranks, size.microbatches].map(String), [p, m]) && (laid || !h))) {
      problem = `Here are 1 to 16 ranks, 1 to 64 micro-batches, 1 to 4 stages per rank; shown are ${size.ranks}, ${size.microbatches}, ${laid ? h.length / size.ranks : 1}.`;
    }
    this.start(level === "own" ? ownSite({ ...size, kinds: ["FB", "FIW", "FBIW"].includes(k) ? k : "FB" }) : found, "", asked);
    if (this.misread) problem ||= `The address's times are ${4 + (this.times.slow?.length ?? 0)} numbers from 0 to 8; here are the usual ones.`;
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
      this.misread = Boolean(asked?.t) && !right;
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
      const alone = new Build(whole), isPart = alone.replay(rows) || !alone.finished; // one that is whole has a size of its own
      const fits = rows.length === site.ranks && (isPart ? whole.microbatches <= site.microbatches : whole.microbatches === site.microbatches) && [...whole.kinds].every((kind) => site.kinds.includes(kind))
        && rows.every((row, rank) => row.every(({ stage }) => site.home[stage] === rank));
      if (!fits || (site.id === "own" && rows.flat().length && !same(whole, site))) this.start(whole, "");
      const reason = this.load(rows);
      this.given = true;
      this.after(reason ? `Read up to here: ${reason}.` : "Read.");
    } catch (error) { this.tell(error.message); }
  }

  fragment() {
    const { site, build, times } = this, parts = [`level=${site.id}`];
    if (site.id === "own") parts.push(`p=${site.ranks}`, `m=${site.microbatches}`, `h=${site.home.map((rank) => rank.toString(MOST.ranks)).join("")}`, `k=${site.kinds}`);
    if (!this.usual) parts.push(`limit=${this.limit ?? 1024}`, `t=${[...TIMES.map((name) => times[name]), ...(times.slow ?? [])]}`);
    if (build.moves.length) parts.push(`s=${print(build.rows).replaceAll("\n", ";")}`);
    return `#${parts.join("&")}`;
  }

  save() {
    clearTimeout(this.saving); // an address may change some hundred times a minute at most
    this.saving = setTimeout(() => {
      const text = print(this.build.rows);
      if (this.area !== document.activeElement) this.area.value = text;
      this.toKernel(() => { this.model?.set({ text, times: this.times }); this.model?.save_changes(); });
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
    else this.tell([said ?? (last ? `${this.words(this.graph.actions.findIndex((one) => nameOf(one) === nameOf(last)))}.` : BEGIN), dead && `A ${dead}.`].filter(Boolean).join(" "));
    this.refresh();
  }

  finish(said) {
    const { sum: { length, bubble }, site, par, build } = this, level = site.id !== "own", won = level && this.usual && !this.given;
    const best = Number(this.stored(site.id)), kept = !won || (best && best <= length / 1e6) || this.store(site.id, length / 1e6);
    const { is, like } = recognise(build.rows, build.home), named = is.length ? is : like;
    const judged = !par ? "" : length < par ? `, below par (${ms(par)})!` : length === par ? ", par!" : `; par is ${ms(par)}. Point at idle time to see what it waits for.`;
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
    const silent = "The kernel does not answer: it is busy, or gone. What you built stays, and runs in a terminal as below.";
    const sent = this.toKernel(() => model.send({ run: text }));
    this.tell(sent ? `Asked the kernel to run it on ${plural(build.ranks, "real rank")}.` : silent);
    if (sent) this.patience = setTimeout(() => this.tell(silent), 5000);
  }

  // Does what needs the kernel; returns whether its channel is open.
  toKernel(act) { try { act(); return true; } catch { return false; } }

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

  // ---- what stands

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
}

// Shows a builder: anywidget calls it with a model and el, a page with an element and data. Returns what ends it.
function render({ model, el, element = el, data = model.get("data") }) {
  const builder = new ScheduleBuilder(element, data, model);
  return () => builder.ended.abort();
}

export default { render };
