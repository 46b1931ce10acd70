// The picture of a Panel: an image with its alt text, and a line under it that screen readers announce.
// A new image replaces the old one only when it is there, so that a moving slider never shows an empty frame. It is
// decoded with the frame that shows it (decoding: sync). To wait for decode() instead takes a frame more: the browser
// begins to decode with the next one.

const STYLE = `
  .distlab-shown, .distlab-picture { display: contents; }
  .distlab-picture img { width: min(100%, 1280px); max-height: max(280px, 100vh - 330px); box-sizing: border-box;
    align-self: flex-start; object-fit: contain; object-position: left; background: white; border: 1px solid var(--jp-border-color2, #ddd); border-radius: 4px; }
  .distlab-picture img[hidden] { display: none; }
  .distlab-picture figcaption { order: 1; max-width: 1280px; margin: 6px 2px 2px; white-space: pre-line;
    font: var(--jp-content-font-size1, 14px)/1.45 var(--jp-content-font-family, sans-serif);
    color: var(--jp-content-font-color1, #1a1a1a); }
  .distlab-picture figcaption.failed { padding: 6px 10px; border-left: 4px solid var(--jp-error-color1, #d32f2f);
    background: var(--jp-rendermime-error-background, #fdd); }
`;

function render({ model, el }) {
  const style = document.createElement("style");
  const figure = document.createElement("figure");
  const image = document.createElement("img");
  const line = document.createElement("figcaption");
  style.textContent = STYLE;
  el.classList.add("distlab-shown"); // the picture and its words stand in the panel itself, and the words come last
  figure.className = "distlab-picture";
  line.setAttribute("aria-live", "polite");
  image.decoding = "sync";
  figure.append(image, line);
  el.append(style, figure);
  let newest = 0;
  let address = "";
  const endNames = nameControls(el);

  async function show() {
    const turn = ++newest;
    line.textContent = model.get("text");
    line.classList.toggle("failed", model.get("failed"));
    const png = model.get("png");
    if (!png || !png.byteLength) {
      image.hidden = true;
      return;
    }
    const next = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    const probe = new Image();
    await new Promise((there) => { // a picture that is none is shown as the browser shows one, with its alt text
      probe.onload = probe.onerror = there;
      probe.src = next;
    });
    if (turn !== newest) {
      URL.revokeObjectURL(next);
      return;
    }
    image.src = next;
    image.alt = model.get("title");
    image.hidden = false;
    if (address) URL.revokeObjectURL(address);
    address = next;
  }

  model.on("change", show);
  show();
  return () => {
    model.off("change", show);
    endNames();
    if (address) URL.revokeObjectURL(address);
  };
}

export default { render };
