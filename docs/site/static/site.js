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

  // What answers a prediction is closed, as in a notebook, until one commits to a number or presses "Show me": the cells
  // whose text locks it or compares with it.
  const outputs = [...document.querySelectorAll(".cell_output")], textOf = (output) => output.parentElement.textContent;
  for (const question of outputs) {
    const [, name, unit = ""] = /(\w+) = predict\([^]*?(?:unit="([^"]*)"|\)\n)/.exec(textOf(question)) ?? [];
    if (!name) continue;
    const closed = outputs.filter((output) => RegExp(`\\b${name}\\.(lock|compare)\\(`).test(textOf(output)));
    const words = question.textContent.trim().replace(" (not answered yet)", "");
    const forms = [question, ...closed].map((output) => {
      const form = document.createElement("form");
      form.className = "prediction";
      form.innerHTML = `<label></label> <input type="number" step="any" required> <button>Commit</button> <button type="button">Show me</button>`;
      const [label, input, , show] = form.children;
      label.append(output === question ? words : `Closed until you commit to a number. ${words}`, " ", input, ` ${unit}`);
      form.onsubmit = (event) => { event.preventDefault(); open(`You predicted ${input.value} ${unit}.`); };
      show.onclick = () => open("You gave no number.");
      output.before(form);
      output.closed = (output.closed ?? 0) + 1; // two predictions may close one output
      output.hidden = true;
      return form;
    });
    const open = (told) => {
      for (const output of [question, ...closed]) {
        output.hidden = (output.closed -= 1) > 0;
        for (const said of output.querySelectorAll("pre")) said.textContent = said.textContent.replace(/You gave no number.|.not answered yet./, told);
      }
      forms.forEach((form) => form.remove());
    };
  }

  const make = (...given) => window.distlabPlayers.make(...given); // of players/computed.js, which loads after this file

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

  function play(box, data) {
    box.replaceChildren();
    box.dataset.ready = "true";
    if (data.levels) return window.distlabBuilder.render({ element: box, data });
    const { control, compute } = window.distlabPlayers;
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
