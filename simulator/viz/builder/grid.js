// The grid of the schedule builder on its canvas: actions that stand, ghosts of those that are ready, idle time, memory.
// What is drawn is what `solve` has worked out from the Build of engine.js.

const ROW = 54, STRIP = 18, STEP = ROW + STRIP + 12, NAMES = 90, TOP = 24, AXIS = 26; // pixels; ROW holds two ghosts
const LEAST = 18, WIDEST = 64, GHOST = 32; // pixels across: of the shortest box until the longest is WIDEST; of a ghost
const FILL = { F: "#56B4E9", B: "#E69F00", I: "#F0E442", W: "#009E73" };
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const INK = "#111", BRAND = "#2f8de4", ALARM = "#D55E00", HELD = "#9a7bb0"; // on light paper and on dark

const ms = (ns) => `${Number((ns / 1e6).toFixed(2))} ms`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const wholeOf = (text, most, other) => (/^\d{1,6}$/.test(text) && +text >= 1 && +text <= most ? +text : other);
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

// Returns a colour with a share of white in it: ghosts, and later stages of a rank.
function lighter(hex, share) {
  const part = (at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * (1 - share) + 255 * share);
  return `rgb(${part(1)} ${part(3)} ${part(5)})`;
}

class Grid {
  // ---- what stands, worked out after each change

  solve() {
    const { build, site, times } = this, graph = this.graph = graphOf(build.rows), order = orderOf(graph), key = JSON.stringify([site, times, this.limit]);
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
