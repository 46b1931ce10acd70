// Days and price of a run on each number of devices, with failures: Young's and Daly's model as in simulator/runs. Steps
// come from Python: devices, tokens, seconds, and how long training waits for a checkpoint.

// The part of the time that counts, with the best interval between checkpoints: where e^-(t + C)/M = 1 - t/M.
function usefulOf(save, between, restart) {
  if (between === Infinity) return 1;
  let [low, high] = [0, 1];
  for (let turn = 0; turn < 60; turn++) {
    const middle = (low + high) / 2;
    [low, high] = middle < 1 && Math.log1p(-middle) + middle + save / between > 0 ? [middle, high] : [low, middle];
  }
  const late = high + save / between, again = restart / between;
  return late + again < 100 ? high / (Math.exp(again) * Math.expm1(late)) : 0;
}

PLAYERS.cost = {
  begin: { price: 2.5, tokens: 15e12, failures: "llama-3", restart: 10 },
  controls: (data) => [
    ["price", "dollars per GPU hour", range(96, (place) => (place + 5) / 10), (value) => value.toFixed(2)],
    ["tokens", "tokens", range(16, (place) => [1, 2, 5][place % 3] * 10 ** (9 + Math.floor(place / 3))).concat(15e12).sort((a, b) => a - b), inWords],
    ["failures", "failures", Object.keys(data.rates), Object.keys(data.rates)],
    ["restart", "minutes to restart", range(120, (place) => place + 1)],
  ],

  state(data, { price, tokens, failures, restart }) {
    const bills = data.steps.map(([devices, each, seconds, save]) => {
      const hourly = data.rates[failures] * devices, between = hourly > 1e-12 ? 3600 / hourly : Infinity;
      const useful = usefulOf(save, between, 60 * restart), hours = (Math.ceil(tokens / each) * seconds) / useful / 3600;
      return { devices, useful, days: hours / 24, dollars: hours * devices * price, names: [] };
    });
    const stuck = bills.find(({ useful }) => useful < 1e-3);
    const best = { shortest: ({ days }) => days, cheapest: ({ dollars }) => dollars, "sweet spot": ({ days, dollars }) => days * dollars };
    const found = Object.values(best).map((of) => bills.reduce((least, each) => (of(each) < of(least) ? each : least)));
    Object.keys(best).forEach((name, at) => found[at].names.push(name));
    return { ...data, price, tokens, bills, found, stuck };
  },

  say({ model, cluster, price, tokens, bills, found, stuck }) {
    if (stuck) return ["The run does not get on", `${counted(stuck.devices, "device")} fail too often: use fewer, or restart faster.`];
    const [short, cheap, sweet] = found.map(({ devices }) => devices);
    const lines = bills.map(({ devices, days, dollars, names }) =>
      `${counted(devices, "device")}: ${spanOf(86400 * days)}, ${commas(dollars)} dollars${names.length ? ": " : ""}${names.join(" and ")}.`);
    return [short === cheap ? `${counted(short, "device")} are both fastest and cheapest`
      : `Fastest on ${commas(short)} devices, cheapest on ${commas(cheap)}, sweet spot ${commas(sweet)}`,
    [`${model}, ${inWords(tokens)} tokens on ${cluster}, ${price} dollars for a device and an hour, with failures.`, ...lines].join("\n")];
  },

  draw(pen, { bills, stuck }) {
    if (stuck) return;
    const row = 34, left = 92, half = (pen.wide - left) / 2, most = ["days", "dollars"].map((key) => Math.max(...bills.map((each) => each[key])));
    ["devices", "days", "dollars"].forEach((name, at) => pen.words(at && left + (at - 1) * half, 14, name, { bold: true }));
    bills.forEach((each, place) => {
      const y = 22 + place * row;
      pen.words(0, y + 15, commas(each.devices), { bold: each.names.length > 0 });
      pen.words(0, y + 28, each.names.map((name) => name.split(" ")[0]).join(", "), { size: 11 });
      ["days", "dollars"].forEach((key, which) => {
        const x = left + which * half, text = which ? inWords(each.dollars) : spanOf(86400 * each.days), room = half - 8 - 6.8 * text.length - 6;
        pen.box(x, y, Math.max(2, (each[key] / most[which]) * room), 22, which ? "#D55E00" : "#0072B2", [], each.names.length ? { stroke: "currentColor", "stroke-width": 2 } : {});
        pen.words(x + (each[key] / most[which]) * room + 6, y + 16, text, { size: 12 });
      });
    });
  },
};
