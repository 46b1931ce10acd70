// Asks the builder's engine, whose scripts are the arguments: JSON questions, one a line, from stdin; answers to stdout.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const scripts = process.argv.slice(2).map((path) => readFileSync(path, "utf8")).join("\n");
const NAMES = "parse print check computations graphOf orderOf tableOf run summary peaks critical chainOf whyIdle Build known recognise "
  + "parOf nameOf parseAction";
const E = new Function(`${scripts}\nreturn { ${NAMES.split(" ").join(", ")} };`)();

const ASKED = {
  parse: ({ text }) => E.print(E.parse(text)),
  name: ({ text, home }) => E.recognise(E.parse(text), home),
  par(site) { const best = E.parOf(site, site.times); return best && [best.length, best.title]; },
  known: (site) => Object.fromEntries(E.known({ ...site, kinds: "FBIW" }).map(([title, rows]) => {
    const renumbered = rows.map((row) => row.map((one) => ({ ...one, microbatch: site.microbatches - 1 - one.microbatch })));
    return [title, [E.print(rows), E.recognise(rows, site.home), E.recognise(renumbered, site.home)]];
  })),
  ends({ moves, ...site }) { // of each move: why not, whether it is a dead end, and what was said of that before it
    const build = new E.Build(site);
    return moves.map(E.parseAction).map((one) => [build.deadEnd(one), build.place(one), build.deadEnd()])
      .map(([before, why, dead]) => [why, dead, before]);
  },
  run({ text, times, whole }) {
    const rows = E.computations(E.parse(text)), graph = E.graphOf(rows), order = E.orderOf(graph), home = [];
    const fault = whole ? E.check(rows) : null;
    graph.actions.forEach(({ stage, rank }) => { home[stage] ??= rank; });
    const numbered = [...home].every((rank) => rank !== undefined); // a builder's stages have no gap
    const build = numbered && new E.Build({ ranks: graph.ranks, microbatches: graph.microbatches, home, kinds: "FBIW" });
    const moved = numbered && build.replay(rows) === "" && (!whole || build.finished);
    if (fault || !order.whole) return { fault, moved };
    const table = E.tableOf(times, graph.stages), ran = E.run(graph, table), every = (of) => graph.actions.map((_, i) => of(graph, table, ran, i));
    return { fault, moved, ...ran, ...E.summary(graph, ran), peaks: E.peaks(rows), ...E.critical(graph, table, ran),
      chains: every(E.chainOf), why: every(E.whyIdle) };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { ask, ...rest } = JSON.parse(line);
  let answer;
  try { answer = ASKED[ask](rest); } catch (error) { answer = { error: error.message }; }
  console.log(JSON.stringify(answer));
}
