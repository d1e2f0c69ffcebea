"use strict";
// The curves of several runs over each other, asked for every two seconds. Texts are set as text, never as HTML.

const COLOURS = ["computing", "bad", "server", "aggregator", "dim", "standby"];
const charts = {};
let seen = "";

const seconds = (s) => s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(1)} ms`;

function drawTable(runs) {
  const columns = [["", "state", "step", "loss", "p50 of a step", "p99", "goodput", "stalls", ...Object.keys(runs[0].settings)]];
  for (const run of runs) columns.push([run.name, run.ended + (run.why ? `: ${run.why}` : "") || "running",
    `${run.step.toLocaleString("en")}${run.steps ? ` of ${run.steps.toLocaleString("en")}` : ""}`, number((run.curves.loss || { mean: [] }).mean.at(-1)),
    seconds(run.p50), seconds(run.p99), `${(100 * run.goodput).toFixed(1)} %`, String(run.stalls), ...Object.values(run.settings)]);
  one("runs").replaceChildren(...columns[0].map((_, row) => {
    const line = element("tr");
    line.append(...columns.map((cells, i) => element(i ? "td" : "th", cells[row])));
    if (!row) [...line.children].slice(1).forEach((name, i) => { name.style.color = colour(COLOURS[i % COLOURS.length]); });
    return line;
  }));
}

function drawCurve(name, runs) {
  const none = { step: [], mean: [] };
  const data = uPlot.join(runs.map((run) => { const c = run.curves[name] || none; return [c.step, c.mean]; }));
  if (charts[name]) { charts[name].setData(data); return; }
  const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
  const box = element("div");
  one("charts").append(box);
  const series = runs.map((run, i) => ({ label: run.name, stroke: colour(COLOURS[i % COLOURS.length]), width: 1.5, spanGaps: true,
    dash: i ? [6, 3] : undefined, value: (_, value) => number(value) }));
  charts[name] = new uPlot({
    title: name, width: Math.max(200, box.clientWidth), height: 260, series: [{ label: "step" }, ...series],
    scales: { x: { time: false } }, axes: [axis, { ...axis, size: 64, values: (_, all) => all.map(number) }],
    cursor: { sync: { key: "steps" } },
  }, data, box);
}

function fitCharts() {
  for (const plot of Object.values(charts)) plot.setSize({ width: Math.max(200, plot.root.parentElement.clientWidth), height: 260 });
}

async function look() {
  try {
    const answer = await ask(`runs?seen=${encodeURIComponent(seen)}`);
    if (answer.status === 403) {
      one("status").textContent = await answer.text();
      return;
    }
    if (answer.status === 200) {
      const news = await answer.json(), before = Object.keys(charts).length;
      seen = news.state;
      drawTable(news.runs);
      for (const name of new Set(news.runs.flatMap((run) => Object.keys(run.curves)))) drawCurve(name, news.runs);
      if (Object.keys(charts).length > before) fitCharts();
    }
    one("status").textContent = "";
  } catch {
    one("status").textContent = "not connected: is `rallypoint watch` still running? trying again ...";
    one("status").className = "bad";
  }
  setTimeout(look, 2000);
}
look();

let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(fitCharts, 100); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
