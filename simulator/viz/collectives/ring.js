// The ring all-reduce, step by step, as ring.py reads it from a record: a row for each rank, a column for each chunk.
// In each step a rank sends one chunk to the next rank, which is the row below.

PLAYERS.ring = {
  begin: { ranks: 4, bytes: 1e6, link: "ethernet-10g", step: 3 },
  controls: (data, { ranks }) => [
    ["ranks", "ranks", range(7, (place) => place + 2)], ["bytes", "tensor", [1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9], bytesOf],
    ["link", "wire", Object.keys(data.links), Object.keys(data.links)], ["step", "step", range(2 * ranks - 1)],
  ],

  state(data, { ranks: size, bytes, link, step }) {
    const total = 2 * (size - 1), part = Math.round(bytes / size), own = data.links[link];
    const chunks = range(total, (number) => range(size, (place) => (place - number + 2 * size) % size));
    const states = [range(size, (place) => range(size, () => range(size, (rank) => rank === place)))];
    for (const row of chunks) { // parts[rank][chunk][whose]: the receiver has the sender's parts too
      const before = states[states.length - 1], after = before.map((chunk) => chunk.map((parts) => [...parts]));
      row.forEach((chunk, place) => before[place][chunk].forEach((has, rank) => { after[(place + 1) % size][chunk][rank] ||= has; }));
      states.push(after);
    }
    const copies = step > 0 && chunks[step - 1].every((chunk, place) => states[step - 1][place][chunk].every(Boolean));
    return { size, step, total, part, copies, sent: step ? chunks[step - 1] : [], before: states[step - 1], parts: states[step],
      seconds: messagesS(part, 1, part, own) };
  },

  say({ size, step, total, part, copies, sent, before, parts, seconds }) {
    const does = copies ? " of finished sums, and its neighbour copies them" : ", and its neighbour adds its own part";
    const title = step ? `Step ${step} of ${total}: every rank sends ${bytesOf(part)}${does}`
      : `Before the first step: each of ${size} ranks holds its own tensor, cut into ${size} chunks`;
    const whole = Math.min(...parts.map((chunks) => chunks.filter((own) => own.every(Boolean)).length));
    const note = `Sent so far: ${bytesOf(step * part)} of ${bytesOf(total * part)} per rank. Chunks summed on every rank: ${whole} of ${size}.`;
    const sends = sent.map((chunk, place) => {
      const whose = range(size).filter((rank) => before[place][chunk][rank]), many = whose.length > 1 ? "s" : "";
      const what = whose.length < size ? `part${many} ${whose.join("+")}` : "the whole sum";
      return `rank ${place} sends ${String.fromCharCode(65 + chunk)} (${what}) to ${(place + 1) % size}`;
    });
    return [title, step ? `${note} This step took ${secondsOf(seconds)}. ${sends.join("; ")}.` : note];
  },

  draw(pen, { size, sent, parts }) {
    const left = 56, wide = (pen.wide - left) / size, tall = 34, gap = 18;
    for (let chunk = 0; chunk < size; chunk++) pen.words(left + (chunk + 0.5) * wide, 14, String.fromCharCode(65 + chunk), { side: "middle", bold: true });
    for (let rank = 0; rank < size; rank++) {
      const y = 36 + rank * (tall + gap);
      pen.words(0, y + 22, `rank ${rank}`, { bold: true });
      for (let chunk = 0; chunk < size; chunk++) {
        const x = left + chunk * wide + 2, slot = (wide - 4) / size;
        if (parts[rank][chunk].every(Boolean)) pen.box(x, y, wide - 4, tall, SHARED, "sum");
        else parts[rank][chunk].forEach((has, who) => pen.box(x + who * slot, y, slot - 1, tall, has ? RANKS[who] : IDLE, has && slot > 12 ? who : []));
        if (sent[(rank + size - 1) % size] !== chunk) continue;
        const middle = x + wide / 2 - 2, arrow = (bottom) => pen.path([[middle, bottom - 14], [middle, bottom - 2], [middle - 5, bottom - 8], [middle, bottom - 2], [middle + 5, bottom - 8]], ARROW);
        pen.frame(x, y, wide - 4, tall);
        arrow(y);
        if (!rank) arrow(36 + size * (tall + gap)); // the last rank sends to the first
      }
    }
    pen.legend([...range(Math.min(size, 4), (rank) => [RANKS[rank], `rank ${rank}'s part`]), [IDLE, "not in it yet"], [SHARED, "the whole sum"]]);
  },
};
