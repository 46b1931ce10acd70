// How a Timeline is painted: rows, boxes or pixel columns, the ends, the time axis and the names of ranks and lanes.
// A scene holds rows, kinds, total_height, ends, view, chosen, and what was unpacked: boxes and labels, or a picture.

const AXIS = 42, TOP = 24, RIGHT = 16, LARGEST_ROW = 30;
const FIELDS = 11; // of a box: start, end, top, height, kind, row, bytes, name, label, stage, micro-batch
const MAX_LABELS = 600, SMALLEST_LABEL = 8, BARE_LABEL = 10;
const FONT = "system-ui, sans-serif";

function rounded(value, units) {
  const [size, unit] = units.find(([least]) => Math.abs(value) >= least) || units[units.length - 1];
  return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${unit}`;
}
const seconds = (value) => rounded(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const bytes = (value) => rounded(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "bytes"]]);

// Returns the rows of each rank; ranks of two schedules that are compared have the same numbers further down.
function groupsOf(rows) {
  const groups = [];
  for (const row of rows) {
    if (groups.length && groups[groups.length - 1][0].rank === row.rank) groups[groups.length - 1].push(row);
    else groups.push([row]);
  }
  return groups;
}

// Returns where the rows go: left and wide in pixels across, unit pixels for a height of 1, tall in all.
function placeOf(context, scene, width, height) {
  const unit = Math.min((height - TOP - AXIS) / scene.total_height, LARGEST_ROW);
  const ranks = new Set(scene.rows.map((row) => row.rank));
  const named = unit * 0.62 >= 10 && scene.rows.length > groupsOf(scene.rows).length;
  context.font = `bold 13px ${FONT}`;
  const rank = Math.max(...[...ranks].map((number) => context.measureText(`rank ${number}`).width));
  context.font = `12px ${FONT}`;
  const words = named ? scene.rows.map((row) => context.measureText(row.predicted ? "predicted" : row.lane).width) : [0];
  const left = Math.ceil(rank + 12 + (named ? Math.max(...words) + 14 : 0));
  return { left, wide: Math.max(width - left - RIGHT, 50), unit, tall: scene.total_height * unit, named };
}

function paint(context, scene, place, look) {
  const [low, high] = scene.view, { left, wide, unit, tall } = place;
  const xOf = (time) => left + ((time - low) / (high - low)) * wide;
  context.save();
  context.beginPath();
  context.rect(left, TOP, wide, tall + 1);
  context.clip();
  context.fillStyle = look.idle;
  for (const row of scene.rows) if (!row.predicted) context.fillRect(left, TOP + row.top * unit, wide, row.height * unit);
  if (scene.until !== null) { // what had happened by then
    context.beginPath();
    context.rect(left, TOP, Math.max(0, xOf(scene.until) - left), tall + 1);
    context.clip();
  }
  if (scene.picture) paintColumns(context, scene, place, xOf);
  else paintBoxes(context, scene, place, xOf, look);
  context.restore();
  if (scene.paths.length) paintPaths(context, scene.paths, place, xOf);
  if (scene.until !== null) paintClock(context, xOf(scene.until), place);
  paintNames(context, scene, place, look);
  paintEnds(context, scene, place, xOf, look);
  paintAxis(context, scene, place, xOf, look);
}

function paintClock(context, x, { left, wide, tall }) {
  if (x < left || x > left + wide) return;
  context.fillStyle = "#D55E00";
  context.fillRect(x - 1, TOP - 4, 2, tall + 8);
}

const CRITICAL = "#D6007A"; // no kind has it; it is seen on light and on dark paper

function paintPaths(context, paths, { left, wide, unit, tall }, xOf) {
  context.save();
  context.beginPath();
  context.rect(left, TOP - 2, wide, tall + 4);
  context.clip();
  context.strokeStyle = CRITICAL;
  for (const boxes of paths) {
    context.lineWidth = 2;
    for (const [start, end, top, height] of boxes) {
      context.strokeRect(xOf(start), TOP + top * unit, Math.max(xOf(end) - xOf(start), 1), height * unit);
    }
    context.beginPath();
    boxes.forEach(([start, end, top, height], place) => { // from each box to the next
      if (place) context.lineTo(xOf(start), TOP + (top + height / 2) * unit);
      context.moveTo(xOf(end), TOP + (top + height / 2) * unit);
    });
    context.stroke();
  }
  context.restore();
}

function paintColumns(context, scene, { unit }, xOf) {
  const { columns, lines, span } = scene.packed, x = xOf(span[0]), width = xOf(span[1]) - x;
  context.imageSmoothingEnabled = false;
  let line = 0;
  scene.rows.forEach((row, index) => {
    const tall = row.height * unit, gap = tall > 4 ? 1 : 0;
    context.drawImage(scene.picture, 0, line, columns, lines[index], x, TOP + row.top * unit, width, tall - gap);
    line += lines[index];
  });
}

function paintBoxes(context, scene, { left, wide, unit }, xOf, look) {
  const { boxes, kinds, rows } = scene, labels = [];
  const nextOnLevel = new Map();
  for (let i = boxes.length - FIELDS; i >= 0; i -= FIELDS) { // from the last, to know what covers a box's end
    const level = boxes[i + 5] * 1024 + boxes[i + 2]; // tops are far below 1024
    const x = xOf(boxes[i]), end = Math.max(xOf(boxes[i + 1]), x + 1), free = Math.min(end, nextOnLevel.get(level) ?? Infinity);
    nextOnLevel.set(level, x);
    const from = Math.max(x, left), room = Math.min(free, left + wide) - from;
    if (room > 8 && labels.length < MAX_LABELS) labels.push([i, from, room]);
  }
  let filled = "";
  for (let i = 0; i < boxes.length; i += FIELDS) {
    const x = Math.max(xOf(boxes[i]), left - 4), end = Math.min(Math.max(xOf(boxes[i + 1]), x + 1), left + wide + 4);
    if (end < left || x > left + wide) continue;
    const kind = kinds[boxes[i + 4]], predicted = rows[boxes[i + 5]].predicted, width = end - x;
    const y = TOP + boxes[i + 2] * unit, tall = boxes[i + 3] * unit - (boxes[i + 3] * unit > 4 ? 1 : 0);
    const fill = predicted || scene.ends.dim ? kind.pale : kind.fill; // dim: the machine was not calm
    if (filled !== fill) context.fillStyle = filled = fill;
    context.fillRect(x, y, width > 3 ? width - 1 : width, tall);
    if (predicted && width > 4 && tall > 4) {
      context.strokeStyle = kind.fill;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, width - 2, tall - 1);
    }
    if (i === scene.chosen * FIELDS) {
      context.strokeStyle = look.ink;
      context.lineWidth = 2;
      context.strokeRect(x, y, width, tall);
    }
  }
  paintLabels(context, scene, labels, unit);
}

const widths = new Map(); // of texts at 13 px, from one frame to the next

// Returns the width of a text at 13 px. A font is dear to set, so it is set for a text that was not seen before only.
function widthOf(context, text) {
  if (!widths.has(text)) {
    if (widths.size > 10000) widths.clear();
    context.font = `13px ${FONT}`;
    widths.set(text, context.measureText(text).width);
  }
  return widths.get(text);
}

function paintLabels(context, scene, labels, unit) {
  const { boxes } = scene, bySize = new Map(); // size and colour: what is written in them
  for (const [i, from, room] of labels) {
    const height = boxes[i + 3], kind = scene.kinds[boxes[i + 4]];
    const full = Math.min(13, Math.floor(height * unit * 0.8)), texts = scene.labels[boxes[i + 8]];
    let size = full, text = "";
    for (const [words, reserved, isNumber] of texts) { // the longest that fits; a short one may shrink
      const fits = Math.floor((13 * (room - 4)) / widthOf(context, reserved));
      size = Math.min(full, fits, isNumber ? BARE_LABEL : full);
      if (size >= (words.length <= 4 ? SMALLEST_LABEL : Math.max(SMALLEST_LABEL, full - 1))) {
        text = words;
        break;
      }
    }
    if (!text) continue;
    const pale = scene.rows[boxes[i + 5]].predicted || scene.ends.dim;
    const ink = pale ? kind.pale_ink : kind.ink, look = `${size} ${ink}`;
    if (!bySize.has(look)) bySize.set(look, { size, ink, written: [] });
    bySize.get(look).written.push([text, from + room / 2, TOP + (boxes[i + 2] + height / 2) * unit]);
  }
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const { size, ink, written } of bySize.values()) {
    context.font = `${size}px ${FONT}`;
    context.fillStyle = ink;
    for (const [text, x, y] of written) context.fillText(text, x, y);
  }
}

function paintNames(context, scene, { left, unit, tall, named }, look) {
  const groups = groupsOf(scene.rows), every = Math.ceil((groups.length * 15) / tall);
  context.textBaseline = "middle";
  context.font = `${unit >= 16 ? "bold " : ""}13px ${FONT}`;
  context.fillStyle = look.ink;
  context.textAlign = named ? "left" : "right";
  for (let index = 0; index < groups.length; index += every) {
    const rows = groups[index], last = rows[rows.length - 1], y = TOP + ((rows[0].top + last.top + last.height) / 2) * unit;
    context.fillText(`rank ${rows[0].rank}`, named ? 2 : left - 8, y);
  }
  context.font = `bold 13px ${FONT}`;
  context.textAlign = "left";
  for (const { at, text } of scene.headings) context.fillText(text, left, TOP + at * unit);
  if (!named) return;
  context.font = `12px ${FONT}`;
  context.fillStyle = look.faint;
  context.textAlign = "right";
  for (const row of scene.rows) {
    context.fillText(row.predicted ? "predicted" : row.lane, left - 8, TOP + (row.top + row.height / 2) * unit);
  }
}

function paintEnds(context, scene, { left, wide, tall }, xOf, look) {
  context.strokeStyle = context.fillStyle = look.ink;
  context.lineWidth = 1.4;
  (scene.ends.bands_s || []).forEach((band, predicted) => {
    const [from, to] = band.map((time) => Math.min(Math.max(xOf(time), left), left + wide));
    context.globalAlpha = predicted ? 0.05 : 0.14;
    context.fillRect(from, TOP, to - from, tall);
    context.globalAlpha = 0.6;
    context.setLineDash([2, 3]);
    if (predicted) for (const x of [from, to]) if (x > left && x < left + wide) context.strokeRect(x, TOP, 0, tall);
    context.setLineDash([]);
  });
  context.globalAlpha = 1;
  scene.ends.at_s.forEach((end, predicted) => {
    const x = xOf(end);
    if (x < left || x > left + wide) return;
    context.setLineDash(predicted ? [5, 4] : []);
    context.beginPath();
    context.moveTo(x, TOP - 5);
    context.lineTo(x, TOP + tall);
    context.stroke();
  });
  context.setLineDash([]);
  const x = xOf(Math.max(...scene.ends.at_s));
  context.font = `13px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const room = Math.min(left, Math.max(0, left + wide - context.measureText(scene.ends.text).width));
  const least = room + context.measureText(scene.ends.text).width;  // it may stand above the ranks' names
  if (x >= left && x <= left + wide) context.fillText(scene.ends.text, Math.max(x, least), 9);
}

const formats = new Map(); // by digits after the point: one takes longer to make than a whole axis to write

function numbersOf(digits) {
  const places = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en", places));
  return formats.get(digits);
}

function paintAxis(context, scene, { left, wide, tall }, xOf, look) {
  const [low, high] = scene.view, [size, unit] = high >= 2 ? [1, "s"] : high >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const least = (high - low) / Math.max(wide / 95, 2) / size, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= least * 0.999) * power;
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9) + (Math.abs(step / power - 2.5) < 1e-6 ? 1 : 0));
  const y = TOP + tall + 3, numbers = numbersOf(digits);
  context.strokeStyle = context.fillStyle = look.ink;
  context.lineWidth = 1;
  context.font = `12px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "top";
  context.beginPath();
  context.moveTo(left, y + 0.5);
  context.lineTo(left + wide, y + 0.5);
  for (let tick = Math.ceil(low / size / step - 1e-9) || 0; tick * step * size <= high * (1 + 1e-12); tick++) {
    const x = Math.round(xOf(tick * step * size)) + 0.5;
    context.moveTo(x, y);
    context.lineTo(x, y + 5);
    context.fillText(numbers.format(tick * step), x, y + 7);
  }
  context.stroke();
  context.fillText(`time since the first span began (${unit})`, left + wide / 2, y + 22);
}
