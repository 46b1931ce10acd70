// Widgets in pages without a kernel: a script computes them (players/computed.js), or their states were worked out when
// the site was built. Controls are the browser's own. Timelines are drawn by their own canvas (players/timeline.js).

(() => {
  // What lessons show follows JupyterLab's theme attribute: set it from this site's theme.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => {
    const theme = document.body.dataset.theme;
    document.body.dataset.jpThemeLight = String(theme === "light" || (theme !== "dark" && !dark.matches));
  };
  new MutationObserver(follow).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  dark.addEventListener("change", follow);
  follow();

  for (const [place, label] of [[".sidebar-tree", "Pages"], [".toc-tree", "On this page"]]) {
    const tree = document.querySelector(place);
    tree?.setAttribute("role", "navigation");
    tree?.setAttribute("aria-label", label);
  }

  const make = (parent, tag, properties = {}) => {
    const element = Object.assign(document.createElement(tag), properties);
    parent.append(element);
    return element;
  };
  let count = 0;

  // A labelled slider or drop-down of labels; `moved` gets the place of the chosen one. `update` sets labels and place.
  function control(parent, { words, slider, labels }, first, moved) {
    const id = `distlab-control-${++count}`, row = make(parent, "div");
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

  // What the canvas asks of the kernel's model, with nobody behind it.
  class Model {
    constructor(values) { Object.assign(this, { values, listeners: new Set() }); }
    get(name) { return this.values[name]; }
    set(name, value) { this.values[name] = value; }
    save_changes() { for (const listener of this.listeners) listener(); }
    on(_event, listener) { this.listeners.add(listener); }
    off(_event, listener) { this.listeners.delete(listener); }
  }

  function showTimeline(box) {
    const stage = make(box, "div"), model = new Model({ columns: 1000 });
    return ({ timeline, moments = [] }, at = moments.length) => {
      const packet = new DataView(Uint8Array.from(atob(timeline.packet), (letter) => letter.charCodeAt(0)).buffer);
      Object.assign(model.values, timeline, { packet });
      if (at < moments.length) [model.values.until_s, model.values.summary] = moments[at];
      if (stage.firstChild) model.save_changes();
      else window.distlabTimeline.render({ model, el: stage });
    };
  }

  function showPicture(box, folder) {
    const figure = make(box, "figure"), image = make(figure, "img"), line = make(figure, "figcaption");
    line.setAttribute("aria-live", "polite");
    return ({ picture, title, text }) => {
      Object.assign(image, { src: folder + picture, alt: title });
      line.textContent = text;
    };
  }

  // A widget that is computed for every value of its controls, and drawn as wide as the page.
  function compute(box, panel, { player, data, values }) {
    const [players, Pen] = window.distlabPlayers, { controls, state, say, draw } = players[player], rows = {};
    const figure = make(box, "figure"), stage = make(figure, "div"), line = make(figure, "figcaption");
    const title = make(line, "strong"), words = make(line, "p");
    line.setAttribute("aria-live", "polite");
    stage.setAttribute("role", "img");
    function show() {
      for (const [name, , options] of controls(data, values)) if (!options.includes(values[name])) values[name] = options[options.length - 1];
      const facts = state(data, values), pen = new Pen(box.clientWidth - 26);
      for (const [name, said, options, labels = String] of controls(data, values)) {
        const one = { words: said, slider: !Array.isArray(labels), labels: Array.isArray(labels) ? labels : options.map(labels) };
        rows[name] ??= control(panel, one, 0, (place) => { values[name] = rows[name].offered[place]; show(); });
        rows[name].offered = options;
        rows[name].update(one.labels, options.indexOf(values[name]));
      }
      [title.textContent, words.textContent] = say(facts);
      stage.setAttribute("aria-label", title.textContent);
      draw(pen, facts);
      stage.innerHTML = pen.svg;
    }
    new ResizeObserver(show).observe(box);
    show();
  }

  function play(box, data) {
    box.replaceChildren();
    box.dataset.ready = "true";
    if (data.levels) return window.distlabBuilder.render({ element: box, data });
    const panel = make(box, "form", { className: "controls" });
    panel.addEventListener("submit", (event) => event.preventDefault());
    if (data.player) return compute(box, panel, data);
    const at = [...data.first];
    const state = () => data.states[at.reduce((sum, place, i) => sum * data.controls[i].labels.length + place, 0)];
    const folder = `${box.dataset.root}players/${box.dataset.widget}/`;
    const show = data.states[0].timeline ? showTimeline(box) : showPicture(box, folder);
    let clock;
    function wind() { // the clock's range is the state's, and stands at its end: everything is shown
      const { moments = [] } = state(), labels = [...moments.map(([until]) => `${(until * 1e3).toPrecision(3)} ms`), "the end"];
      const here = { words: "step through", slider: true, labels };
      if (moments.length) clock ??= control(panel, here, moments.length, (place) => show(state(), place));
      clock?.update(labels, moments.length);
      show(state());
    }
    data.controls.forEach((one, i) => control(panel, one, at[i], (place) => { at[i] = place; wind(); }));
    wind();
  }

  window.distlabPlay = (name) => {
    for (const box of document.querySelectorAll(`.distlab-player[data-widget="${name}"]`)) play(box, window.distlabWidgets[name]);
  };
  Object.keys(window.distlabWidgets ?? {}).forEach(window.distlabPlay);
})();
