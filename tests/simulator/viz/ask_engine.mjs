// Answers questions about schedules with the builder's engine: JSON, one a line, from stdin to stdout.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const NAMES = "parse print computations check graphOf orderOf tableOf run summary peaks held critical whyIdle chainOf Build FAMILIES "
  + "known recognise parOf nameOf parseAction";
const E = new Function(`${process.argv.slice(2).map((path) => readFileSync(path, "utf8")).join("\n")}\nreturn { ${NAMES.split(" ").join(", ")} };`)();

const ASKED = {
  parse: ({ text }) => E.print(E.parse(text)),
  known: (site) => E.known(site).map(([title, rows]) => [title, E.print(rows), E.recognise(rows, site.home)]),
  par: ({ site, times }) => { const best = E.parOf(site, times); return best && [best.length, best.title]; },
  ends: ({ site, moves }) => { // after each move: why it may not be made, and whether it is a dead end (said before, too)
    const build = new E.Build(site);
    return moves.map((one) => {
      const action = E.parseAction(one), before = build.deadEnd(action), why = build.place(action);
      return [why, build.deadEnd(), why || before === build.deadEnd()];
    });
  },
  run({ text, times, whole }) {
    const rows = E.computations(E.parse(text)), graph = E.graphOf(rows), order = E.orderOf(graph), home = [];
    const fault = whole ? E.check(rows) : null;
    graph.actions.forEach(({ stage, rank }) => { home[stage] ??= rank; });
    const fits = graph.stages < 99 && [...home].every((rank) => rank !== undefined);
    const build = fits && new E.Build({ ranks: graph.ranks, microbatches: graph.microbatches, home, kinds: "FBIW" });
    const moved = fits && build.replay(rows) === "" && (!whole || build.finished);
    if (fault || !order.whole) return { fault, moved };
    const table = E.tableOf(times, graph.stages), ran = E.run(graph, table), { slack, path } = E.critical(graph, table, ran);
    const why = graph.actions.map((_, i) => [E.chainOf(graph, table, ran, i), E.whyIdle(graph, table, ran, i)]);
    return { fault, moved, ...ran, ...E.summary(graph, ran), peaks: E.peaks(rows), slack, path, why };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { ask, ...rest } = JSON.parse(line);
  let answer;
  try { answer = ASKED[ask](rest); } catch (error) { answer = { error: error.message }; }
  console.log(JSON.stringify(answer));
}
