// Widgets in pages without a kernel: every state was worked out when the site was built. Controls are the browser's own,
// so that keyboards and screen readers know them. Timelines are drawn by the widget's own canvas (players/timeline.js).

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

  const make = (parent, tag, properties = {}) => {
    const element = Object.assign(document.createElement(tag), properties);
    parent.append(element);
    return element;
  };
  let count = 0;

  // A labelled slider or drop-down of labels; `moved` gets the place of the chosen one.
  function control(parent, { words, slider, labels }, first, moved) {
    const id = `distlab-control-${++count}`;
    const row = make(parent, "div");
    make(row, "label", { htmlFor: id, textContent: words });
    if (!slider) {
      const choice = make(row, "select", { id });
      labels.forEach((label, at) => make(choice, "option", { textContent: label, value: at }));
      choice.value = first;
      choice.addEventListener("input", () => moved(Number(choice.value)));
      return choice;
    }
    const range = make(row, "input", { id, type: "range", min: 0, max: labels.length - 1, value: first });
    const shown = make(row, "output", { htmlFor: id });
    range.tell = (label) => { shown.textContent = label; range.setAttribute("aria-valuetext", label); };
    range.addEventListener("input", () => { range.tell(labels[range.value]); moved(Number(range.value)); });
    range.tell(labels[first]);
    return range;
  }

  // What the canvas asks of the kernel's model, with nobody behind it.
  class Model {
    constructor(values) { this.values = { ...values }; this.listeners = new Set(); }
    get(name) { return this.values[name]; }
    set(name, value) { this.values[name] = value; }
    put(values) { Object.assign(this.values, values); this.save_changes(); }
    save_changes() { for (const listener of this.listeners) listener(); }
    on(_event, listener) { this.listeners.add(listener); }
    off(_event, listener) { this.listeners.delete(listener); }
  }

  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);

  function showTimeline(box) {
    const stage = make(box, "div");
    let model;
    return ({ timeline, moments = [] }, at = moments.length) => {
      const values = { ...timeline, packet: bytes(timeline.packet) };
      if (at < moments.length) [values.until_s, values.summary] = moments[at];
      if (model) return model.put({ ...values, columns: model.get("columns") });
      model = new Model({ columns: 1000, ...values });
      return window.distlabTimeline.render({ model, el: stage });
    };
  }

  function showPicture(box, folder) {
    const figure = make(box, "figure");
    const image = make(figure, "img");
    const line = make(figure, "figcaption");
    line.setAttribute("aria-live", "polite");
    return ({ picture, title, text }) => {
      Object.assign(image, { src: folder + picture, alt: title });
      line.textContent = text;
    };
  }

  function play(box, data) {
    box.replaceChildren();
    const panel = make(box, "form", { className: "controls" });
    panel.addEventListener("submit", (event) => event.preventDefault());
    const at = [...data.first];
    const state = () => data.states[at.reduce((sum, place, i) => sum * data.controls[i].labels.length + place, 0)];
    const folder = `${box.dataset.root}players/${box.dataset.widget}/`;
    const show = data.states[0].timeline ? showTimeline(box) : showPicture(box, folder);
    let clock;
    data.controls.forEach((one, i) => control(panel, one, at[i], (place) => { at[i] = place; wind(); show(state()); }));
    function wind() { // the clock's range is the state's, and stands at its end: everything is shown
      if (!state().moments) return;
      clock?.parentElement.remove();
      const { moments } = state();
      const labels = [...moments.map(([until]) => `${(until * 1e3).toPrecision(3)} ms`), "the end"];
      const here = { words: "step through", slider: true, labels };
      clock = control(panel, here, moments.length, (place) => show(state(), place));
    }
    wind();
    show(state());
    box.dataset.ready = "true";
  }

  window.distlabPlay = (name) => {
    for (const box of document.querySelectorAll(`.distlab-player[data-widget="${name}"]`)) play(box, window.distlabWidgets[name]);
  };
  Object.keys(window.distlabWidgets ?? {}).forEach(window.distlabPlay);
})();
