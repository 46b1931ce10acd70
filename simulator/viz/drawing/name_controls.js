// Names for a screen reader: ipywidgets gives a slider's handle, which has the focus, no name, and the buttons of Play
// an icon alone. A slider with options tells the option's place (4); let it tell the option (2700), which it shows.

const PLAY_BUTTONS = { "fa-play": "play", "fa-pause": "pause", "fa-stop": "stop", "fa-retweet": "repeat" };

function nameAll(panel) {
  const set = (one, attribute, text) => {
    if (text && one && one.getAttribute(attribute) !== text) one.setAttribute(attribute, text);
  };
  for (const slider of panel.querySelectorAll(".widget-hslider")) {
    const handle = slider.querySelector(".noUi-handle");
    set(handle, "aria-label", slider.querySelector(".widget-label")?.textContent);
    const readout = slider.querySelector(".widget-readout");
    if (readout?.style.display !== "none") set(handle, "aria-valuetext", readout?.textContent);
  }
  for (const icon of panel.querySelectorAll(".widget-play i")) {
    const name = [...icon.classList].map((one) => PLAY_BUTTONS[one]).find(Boolean);
    set(icon.closest("button"), "aria-label", name);
  }
}

// Name the controls of the panel that `el` is in, now and whenever they change; return what ends that.
function nameControls(el) {
  const watched = { subtree: true, childList: true, characterData: true, attributeFilter: ["aria-valuetext", "class"] };
  let watcher;
  const waiting = setInterval(() => {
    if (!el.isConnected) return;
    clearInterval(waiting);
    const panel = el.closest(".widget-vbox");
    if (!panel) return;
    watcher = new MutationObserver(() => nameAll(panel));
    watcher.observe(panel, watched);
    nameAll(panel);
  }, 50);
  return () => {
    clearInterval(waiting);
    watcher?.disconnect();
  };
}
