// The canvas of a Timeline: draws what Python packed (boxes, or pixel columns where there are too many), moves the view
// by mouse, touch and keyboard, and asks for more by setting `view`; Python answers with the packet for it.

const SHORTEST_S = 1e-8; // the shortest view
const LATER_MS = [100, 300, 1000, 3000]; // when colours are looked at after a theme's name has changed
const KEYS = "Drag or arrow keys: move. Click, then wheel, or + and −: zoom. 0: everything. Home, End: the ends. " +
  "Point, or n and p: read a span, or why a rank is idle. c: critical path.";

function make(parent, tag, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  parent.append(element);
  return element;
}

class Timeline {
  constructor(model, el) {
    this.model = model;
    this.get = (name) => model.get(name);
    this.frame = this.waiting = 0;
    this.chosen = -1;
    this.build(el);
    this.listen();
    this.changed();
  }

  build(el) {
    const figure = make(el, "figure", { className: "distlab-timeline" });
    figure.setAttribute("data-lm-suppress-shortcuts", "true"); // else 0 0 would restart the kernel
    const head = make(figure, "header");
    this.heading = make(head, "h4");
    const button = (textContent, label, onclick) =>
      Object.assign(make(head, "button", { type: "button", textContent, title: label, onclick }), { ariaLabel: label });
    button("−", "zoom out", () => this.zoom(2));
    button("+", "zoom in", () => this.zoom(0.5));
    button("all", "show everything", () => this.move(0, Infinity));
    this.critical = button("path", "critical path", () => this.toggle());
    this.stage = make(figure, "div", { className: "stage" });
    this.canvas = make(this.stage, "canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "timeline");
    this.tip = make(this.stage, "div", { className: "tip", hidden: true });
    this.tip.setAttribute("aria-live", "polite");
    this.legend = make(figure, "ul", { className: "legend" });
    this.keys = make(figure, "p", { className: "keys", textContent: KEYS });
    this.caption = make(figure, "figcaption");
    this.caption.setAttribute("aria-live", "polite");
    this.figure = figure;
  }

  listen() {
    const on = (name, handler, options) => this.canvas.addEventListener(name, handler.bind(this), options);
    on("keydown", this.key);
    on("wheel", this.wheel, { passive: false });
    on("pointerdown", this.press);
    on("pointermove", this.point);
    on("pointerup", this.release);
    on("pointercancel", this.release);
    on("pointerleave", () => { if (!this.drag) this.hide(); });
    on("blur", this.hide);
    this.update = () => this.changed();
    this.model.on("change", this.update);
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.canvas);
    this.themed = new MutationObserver(() => {
      this.schedule();
      for (const ms of LATER_MS) setTimeout(() => this.recolour(), ms);
    });
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
    // A theme's colours may arrive after its name, and out of sight they may be the old ones: draw when they have come
    // (a transition of 1 ms, in the CSS, says so) and when the canvas comes into sight. A canvas that moves into sight
    // in the middle of it is told by neither: so look again a frame after each drawing, and some times after the name.
    this.figure.addEventListener("transitionend", (event) => { if (event.target === this.figure) this.schedule(); });
    this.seen = new IntersectionObserver((found) => { if (found.some((one) => one.isIntersecting)) this.schedule(); });
    this.seen.observe(this.canvas);
  }

  remove() {
    this.model.off("change", this.update);
    this.resized.disconnect();
    this.themed.disconnect();
    this.seen.disconnect();
  }

  changed() {
    const title = this.get("title"), note = this.get("note");
    if (this.told !== `${title}\n${note}`) {
      this.told = `${title}\n${note}`;
      this.heading.replaceChildren(title);
      if (note) make(this.heading, "small", { textContent: note });
      this.canvas.setAttribute("aria-label", `${title}. ${KEYS}`);
    }
    const said = [this.get("summary"), this.get("path_words")].filter(Boolean).join(" ");
    if (this.caption.textContent !== said) this.caption.textContent = said;
    this.critical.ariaPressed = String(this.get("critical"));
    this.answer();
    const explained = this.kinds !== this.get("kinds") || this.rows !== this.get("rows");
    if (explained) this.explain();
    if (explained || this.packet !== this.get("packet") || this.packed !== this.get("packed")) this.unpack();
    this.schedule();
  }

  explain() {
    [this.kinds, this.rows] = [this.get("kinds"), this.get("rows")];
    this.legend.replaceChildren();
    const entry = (letter, words, style) => {
      const item = make(this.legend, "li");
      Object.assign(make(item, "i", { textContent: letter }).style, style);
      item.append(words);
    };
    const explained = new Map(this.kinds.filter((kind) => kind.explained).map((kind) => [kind.words, kind]));
    for (const kind of explained.values()) { // several kinds may share their words: every send is a send
      entry(kind.letter, kind.words, { background: kind.fill, color: kind.ink });
    }
    if (this.kinds.some((kind) => !kind.explained)) entry("", "lighter: a later stage of the rank", { background: "#a3a3a3" });
    if (this.rows.some((row) => row.predicted)) {
      entry("", "measured", { background: "#666" });
      entry("", "predicted", { background: "#c5c5c5", borderColor: "#666" });
    }
  }

  unpack() {
    [this.packet, this.packed] = [this.get("packet"), this.get("packed")];
    this.chosen = -1;
    this.hide();
    const { buffer, byteOffset, byteLength } = this.packet;
    if (this.packed.form === "boxes") {
      this.boxes = new Float64Array(buffer.slice(byteOffset, byteOffset + byteLength));
      const read = ([text, length]) => [text, text.padEnd(length, "0"), /^\d+$/.test(text)];
      this.labels = this.packed.labels.map((texts) => texts.map(read));
      return;
    }
    const { columns, lines } = this.packed, codes = new Uint8Array(buffer, byteOffset, byteLength);
    this.codes = codes;
    this.picture = Object.assign(document.createElement("canvas"), { width: columns, height: codes.length / columns });
    const pixels = new Uint32Array(codes.length);
    const packedColour = (hex) => 0xff000000 | parseInt(hex.slice(5, 7) + hex.slice(3, 5) + hex.slice(1, 3), 16);
    let at = 0;
    this.rows.forEach((row, index) => {
      const pale = row.predicted || this.get("ends").dim;
      const colours = this.kinds.map((kind) => packedColour(pale ? kind.pale : kind.fill));
      for (const end = at + lines[index] * columns; at < end; at++) pixels[at] = colours[codes[at]] || 0;
    });
    const image = new ImageData(new Uint8ClampedArray(pixels.buffer), columns, codes.length / columns);
    this.picture.getContext("2d").putImageData(image, 0, 0);
  }

  // ---- the view

  move(low, high) {
    const limit = this.get("limit_s"), length = Math.min(Math.max(high - low, SHORTEST_S), limit);
    const start = Math.min(Math.max(low, 0), limit - length);
    this.model.set("view", [start, start + length]); // which draws: see changed()
    this.model.save_changes();
  }

  zoom(factor, around) {
    const [low, high] = this.get("view"), middle = around ?? (low + high) / 2;
    if (high - low <= SHORTEST_S && factor < 1) return;
    this.move(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }

  pan(share) {
    const [low, high] = this.get("view"), by = share * (high - low);
    this.move(low + by, high + by);
  }

  key(event) {
    const [low, high] = this.get("view"), far = event.shiftKey ? 0.5 : 0.1;
    const actions = {
      ArrowLeft: () => this.pan(-far), ArrowRight: () => this.pan(far),
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5), _: () => this.zoom(1.5),
      0: () => this.move(0, Infinity),
      Home: () => this.move(0, high - low), End: () => this.move(this.get("limit_s") - (high - low), this.get("limit_s")),
      c: () => this.toggle(),
      n: () => this.choose(1), p: () => this.choose(-1), Escape: () => this.hide(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  wheel(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey) return; // the page scrolls until the timeline is clicked
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.place.wide);
    else this.zoom(1.0015 ** Math.max(-400, Math.min(400, event.deltaY)), this.timeAt(event.offsetX));
  }

  press(event) {
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, view: this.get("view"), moved: false };
  }

  point(event) {
    if (!this.drag) return this.read(event.offsetX, event.offsetY);
    const by = event.offsetX - this.drag.x, [low, high] = this.drag.view;
    if (!this.drag.moved && Math.abs(by) < 4) return;
    this.drag.moved = true;
    this.canvas.classList.add("dragging");
    this.hide();
    const shift = (by / this.place.wide) * (high - low);
    this.move(low - shift, high - shift);
  }

  release(event) {
    const tapped = this.drag && !this.drag.moved;
    this.drag = null;
    this.canvas.classList.remove("dragging");
    if (tapped) this.read(event.offsetX, event.offsetY);
  }

  // ---- painting

  // Draws at once, while the browser waits for its next frame anyway; what changes before that frame is drawn with it.
  schedule() {
    this.stale = this.waiting !== 0;
    if (this.stale) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (this.stale) this.draw();
      this.publish();
    });
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1, view = this.get("view");
    if (!width) return;
    const scene = { rows: this.rows, kinds: this.kinds, packed: this.packed, view, chosen: this.chosen };
    Object.assign(scene, { total_height: this.get("total_height"), ends: this.get("ends"), labels: this.labels });
    Object.assign(scene, { headings: this.get("headings"), until: this.get("until_s"), paths: this.get("paths") ?? [] });
    scene[this.packed.form === "pixels" ? "picture" : "boxes"] = this.packed.form === "pixels" ? this.picture : this.boxes;
    const context = this.canvas.getContext("2d");
    this.place = placeOf(context, scene, width, this.get("height"));
    const height = Math.ceil(this.place.tall + TOP + AXIS);
    this.canvas.style.height = `${height}px`;
    const size = { width: Math.round(width * ratio), height: Math.round(height * ratio) };
    const fits = this.canvas.width === size.width && this.canvas.height === size.height;
    if (!fits) Object.assign(this.canvas, size); // a new size clears the canvas, too
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (fits) context.clearRect(0, 0, width + 1, height + 1);
    this.ink = getComputedStyle(this.figure).color;
    paint(context, scene, this.place, { ink: this.ink, faint: getComputedStyle(this.keys).color, idle: "rgb(128 128 128 / 11%)" });
    const columns = Math.round(this.place.wide * ratio);
    if (columns !== this.get("columns")) {
      this.model.set("columns", columns);
      this.model.save_changes();
    }
    this.drawn = { view, packed: this.packed };
  }

  // Draws again where letters have a different colour now than when they were drawn.
  recolour() {
    if (this.ink && this.figure.isConnected && getComputedStyle(this.figure).color !== this.ink) this.schedule();
  }

  // Says, in the frame that shows it, what was drawn.
  publish() {
    if (!this.drawn) return;
    this.recolour();
    const { view, packed } = this.drawn, [low, high] = packed.form === "pixels" ? packed.view : packed.span;
    const slack = 1e-9 * (view[1] - view[0]);
    const sharp = packed.form === "pixels" ? Math.abs(low - view[0]) + Math.abs(high - view[1]) <= slack : low <= view[0] + slack && high >= view[1] - slack;
    Object.assign(this.canvas.dataset, { view: view.join(" "), form: packed.form, count: packed.count, sharp, frame: ++this.frame });
  }

  // ---- reading a span

  timeAt(x) {
    const [low, high] = this.get("view");
    return low + ((x - this.place.left) / this.place.wide) * (high - low);
  }

  read(x, y) {
    const at = this.timeAt(x), height = (y - TOP) / this.place.unit, slack = 2 * (this.timeAt(1) - this.timeAt(0));
    if (x < this.place.left || x > this.place.left + this.place.wide) return this.hide();
    if (this.packed.form === "pixels") return this.readColumn(x, y, at, height);
    let found = -1;
    for (let i = 0; i < this.boxes.length; i += FIELDS) {
      const [start, end, top, tall] = this.boxes.subarray(i, i + 4);
      if (start > (this.get("until_s") ?? Infinity)) break; // boxes are in order of start
      if (start - slack <= at && at <= end + slack && top <= height && height <= top + tall && (found < 0 || at >= start && at <= end)) found = i;
    }
    this.chosen = found / FIELDS;
    if (found >= 0) this.tell(x, y, this.words(found));
    else this.hide();
    const row = this.rows.findIndex((one) => one.lane === "compute" && one.top <= height && height <= one.top + one.height);
    if (found < 0 && row >= 0) this.ask(row, at, x, y, [`rank ${this.rows[row].rank} is idle`]);
    else if (found >= 0 && this.kinds[this.boxes[found + 4]].words === "wait") this.ask(this.boxes[found + 5], at, x, y, this.words(found));
    this.schedule();
  }

  // ---- why a rank is idle: Python knows

  ask(row, at, x, y, lines) {
    this.pending = { asked: [row, at], x, y, lines };
    this.model.set("asked", [row, at]);
    this.model.save_changes();
  }

  answer() {
    const told = this.get("told");
    if (!this.pending || !told || String(told.asked) !== String(this.pending.asked)) return;
    const { x, y, lines } = this.pending;
    this.pending = null;
    if (told.why) this.tell(x, y, [...lines, told.why]);
  }

  toggle() {
    this.model.set("critical", !this.get("critical"));
    this.model.save_changes();
  }

  words(i) {
    const [start, end, , , kind, row, size, code, , stage, microbatch] = this.boxes.subarray(i, i + FIELDS), at = this.rows[row];
    const short = this.packed.names[code]; // of a large trace an action's letter alone
    const name = short.length === 1 && stage >= 0 && microbatch >= 0 ? `${stage}${short}${microbatch}` : short;
    const side = at.predicted ? "predicted" : this.rows.some((other) => other.predicted) ? "measured" : "";
    const lines = [name, `rank ${at.rank}, ${at.lane}${side ? ", " + side : ""}: ${this.kinds[kind].words}`];
    lines.push(`starts at ${seconds(start)}, takes ${seconds(end - start)}`);
    return size > 0 ? [...lines, `moves ${bytes(size)}`] : lines;
  }

  readColumn(x, y, at, height) {
    const index = this.rows.findIndex((row) => row.top <= height && height <= row.top + row.height);
    const [low, high] = this.packed.span, { columns, lines } = this.packed;
    const column = Math.floor(((at - low) / (high - low)) * columns);
    if (index < 0 || column < 0 || column >= columns) return this.hide();
    const first = lines.slice(0, index).reduce((sum, count) => sum + count, 0), counts = new Map();
    for (let line = first; line < first + lines[index]; line++) {
      const kind = this.kinds[this.codes[line * columns + column]], words = kind ? kind.words : "idle";
      counts.set(words, (counts.get(words) || 0) + 1);
    }
    const parts = [...counts].map(([words, count]) => `${words} about ${Math.round((100 * count) / lines[index])} %`);
    const row = this.rows[index];
    this.tell(x, y, [`rank ${row.rank}, ${row.lane}, near ${seconds(at)}`, parts.join(", "), "zoom in to see single spans"]);
  }

  choose(step) {
    if (this.packed.form !== "boxes") return this.tell(this.place.left + 20, TOP, ["too many spans to read one by one", "zoom in first"]);
    const [low, high] = this.get("view"), count = this.boxes.length / FIELDS;
    let next = this.chosen < 0 ? (step > 0 ? 0 : count - 1) : this.chosen + step;
    while (next >= 0 && next < count && (this.boxes[next * FIELDS + 1] < low || this.boxes[next * FIELDS] > high)) next += step;
    if (next < 0 || next >= count) return;
    this.chosen = next;
    const [start, end, top, tall] = this.boxes.subarray(next * FIELDS, next * FIELDS + 4);
    const middle = (Math.max(start, low) + Math.min(end, high)) / 2;
    const x = this.place.left + ((middle - low) / (high - low)) * this.place.wide, y = TOP + (top + tall / 2) * this.place.unit;
    this.tell(x, y, this.words(next * FIELDS));
    if (start > 0) this.ask(this.boxes[next * FIELDS + 5], start - 1e-9, x, y, this.words(next * FIELDS)); // idle before it
    this.schedule();
  }

  tell(x, y, [first, ...lines]) {
    this.tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: first }));
    for (const line of lines) make(this.tip, "span", { textContent: line });
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, room = this.stage.clientWidth;
    this.tip.style.left = `${Math.max(0, x + 14 + wide > room ? x - wide - 14 : x + 14)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  hide() {
    this.tip.hidden = true;
    this.pending = null;
    if (this.chosen >= 0) this.schedule();
    this.chosen = -1;
  }
}

function render({ model, el }) {
  const timeline = new Timeline(model, el);
  const endNames = nameControls(el);
  return () => {
    endNames();
    timeline.remove();
  };
}

export default { render };
