// What widgets that compute in a page share: numbers as Python writes them, and a pen that draws SVG. A player mirrors a
// panel of Python: PLAYERS[name] = { begin, controls(data, values), state(data, values), say(state), draw(pen, state) }, where
// a control is [name, words, values, labels] (a drop-down where `labels` are words alone) and say returns its words.

const PLAYERS = {};
const RANKS = ["#44AA99", "#CC6677", "#DDCC77", "#AA4499", "#117733", "#999933", "#88CCEE", "#882255"];
const SHARED = "var(--shared, #44546A)", IDLE = "var(--idle, #F1F1F1)", ARROW = "#0072B2";
const BYTES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const LONG = [[86400, "days"], [3600, "h"], [60, "min"]], LARGE = [[1e12, " trillion"], [1e9, " billion"], [1e6, " million"]];

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const range = (count, make = (place) => place) => Array.from({ length: count }, (_, place) => make(place));
const sumsOf = (numbers) => numbers.reduce((all, number) => [...all, all[all.length - 1] + number], [0]); // begins with 0
const even = (value) => (value % 1 === 0.5 ? Math.floor(value) + (Math.floor(value) % 2) : Math.round(value));
const commas = (value) => even(value).toLocaleString("en-US");
const counted = (number, noun) => `${commas(number)} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share, digits = 0) => `${digits ? (100 * share).toFixed(digits) : even(100 * share)} %`;

// Three digits, as .3g: of two that are as near the even one, which only numbers with few bits can have.
function digits(value, count = 3) {
  const size = 10 ** (count - 1 - Math.floor(Math.log10(Math.abs(value) || 1)));
  return Number.isInteger(value * 8) ? even(value * size) / size : Number(value.toPrecision(count));
}

function scaled(value, units) {
  const [size, unit] = units.find(([least]) => Math.abs(value) >= least) ?? units[units.length - 1];
  return `${digits(value / size)} ${unit}`;
}
const bytesOf = (value) => scaled(value, BYTES);
const secondsOf = (value) => (value === 0 ? "0 s" : scaled(value, TIMES));
function spanOf(seconds) {
  const [size, unit] = LONG.find(([least]) => seconds >= 2 * least) ?? [];
  if (!size) return secondsOf(seconds);
  return seconds / size >= 1000 ? `${commas(seconds / size)} ${unit}` : `${digits(seconds / size)} ${unit}`;
}
function inWords(value) {
  const [size, word] = LARGE.find(([least]) => value >= least) ?? [];
  return size ? digits(value / size, 4).toLocaleString("en-US") + word : commas(value);
}

// The time of a number of messages one after the other that carry so many bytes in all, by the fastest protocol.
const messagesS = (size, count, carried, link) => Math.min(...link.protocols
  .filter((one) => size <= one.most_bytes).map((one) => count * one.latency_s + carried / one.bytes_per_s));

class Pen { // draws down a page of some width, in pixels
  constructor(wide) { Object.assign(this, { wide, tall: 0, parts: [] }); }
  add(bottom, ...part) { this.parts.push(part); this.tall = Math.max(this.tall, bottom + 2); }
  box(x, y, wide, tall, fill, text = "", more = {}) {
    this.add(y + tall, "rect", { x, y, width: Math.max(wide, 0), height: tall, style: `fill:${fill}`, ...more });
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16));
    const ink = 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#111" : "#fff", named = { [IDLE]: "currentColor", [SHARED]: "var(--on-shared, #fff)" };
    const shown = [].concat(text).find((one) => String(one).length * 6.6 + 4 <= wide); // the first text that fits
    if (shown !== undefined) this.words(x + wide / 2, y + tall / 2 + 4, shown, { side: "middle", size: 12, colour: named[fill] ?? ink });
  }
  frame(x, y, wide, tall, colour = ARROW, line = 2.5) { this.box(x, y, wide, tall, "none", "", { stroke: colour, "stroke-width": line }); }
  words(x, y, text, { side = "start", size = 13, colour = "currentColor", bold = false } = {}) {
    this.add(y + 4, "text", { x, y, "text-anchor": side, "font-size": size, "font-weight": bold ? 600 : 400, style: `fill:${colour}` }, text);
  }
  path(points, stroke, look = {}) {
    this.add(Math.max(...points.map(([, y]) => y)), "polyline", { points: points.join(" "), stroke, fill: "none", "stroke-width": 2, ...look });
  }
  legend(entries) { // pairs of a colour and words, as many in a line as fit
    let x = 0, y = this.tall + 10;
    for (const [fill, words] of entries) {
      const wide = 30 + 6.7 * words.length;
      if (x && x + wide > this.wide) [x, y] = [0, y + 20];
      this.box(x, y, 14, 14, fill);
      this.words(x + 19, y + 12, words, { size: 12.5 });
      x += wide;
    }
  }
  put(stage) { // in the place of what stood there
    const svg = (tag, attributes, text = "") => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      element.append(text);
      return element;
    };
    stage.replaceChildren(svg("svg", { width: this.wide, height: this.tall, "aria-hidden": true }));
    stage.firstChild.append(...this.parts.map((part) => svg(...part)));
  }
}

const make = (parent, tag, properties = {}) => {
  const element = Object.assign(document.createElement(tag), properties);
  parent.append(element);
  return element;
};
let numControls = 0;

// A labelled slider or drop-down of labels; `moved` gets the place of the chosen one. `update` sets labels and place.
function control(parent, { words, slider, labels }, first, moved) {
  const id = `distlab-control-${++numControls}`, row = make(parent, "div");
  make(row, "label", { htmlFor: id, textContent: words });
  const input = make(row, slider ? "input" : "select", slider ? { id, type: "range", min: 0 } : { id });
  const shown = slider && make(row, "output", { htmlFor: id });
  input.update = (texts, at) => {
    if (!slider && !input.options.length) texts.forEach((label, place) => make(input, "option", { textContent: label, value: place }));
    if (slider) input.max = texts.length - 1;
    input.value = at;
    if (slider) input.setAttribute("aria-valuetext", shown.textContent = texts[at]);
    input.texts = texts;
  };
  input.addEventListener("input", () => { input.update(input.texts, input.value); moved(Number(input.value)); });
  input.update(labels, first);
  return input;
}

// A widget that is computed for every value of its controls, and drawn as wide as the page.
function compute(box, panel, { player, data }) {
  const { begin, controls, state, say, draw } = PLAYERS[player], rows = {}, values = { ...begin };
  const figure = make(box, "figure"), stage = make(figure, "div"), line = make(figure, "figcaption");
  const title = make(line, "strong"), words = make(line, "p");
  line.setAttribute("aria-live", "polite");
  stage.setAttribute("role", "img");
  function show() {
    for (const [name, , options] of controls(data, values)) if (!options.includes(values[name])) values[name] = options[options.length - 1];
    const facts = state(data, values), pen = new Pen(Math.max(box.clientWidth - 26, 240));
    for (const [name, said, options, labels = String] of controls(data, values)) {
      const one = { words: said, slider: !Array.isArray(labels), labels: Array.isArray(labels) ? labels : options.map(labels) };
      rows[name] ??= control(panel, one, 0, (place) => { values[name] = rows[name].offered[place]; show(); });
      rows[name].offered = options;
      rows[name].update(one.labels, options.indexOf(values[name]));
    }
    [title.textContent, words.textContent] = say(facts);
    stage.setAttribute("aria-label", title.textContent);
    draw(pen, facts);
    pen.put(stage);
  }
  new ResizeObserver(show).observe(box);
  show();
}
