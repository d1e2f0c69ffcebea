"use strict";
// Everything that the page shows comes over one stream (watch/app.py). Texts are set as text, never as HTML.

const run = { curves: {}, evaluations: {}, marks: [], members: [] };
const charts = {};

const seconds = (s) => s >= 3600 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`
  : s >= 60 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : s >= 1 ? `${s.toFixed(1)} s` : `${(s * 1000).toFixed(0)} ms`;
const bytes = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e5 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(1)} kB`;

const short = (step) => step >= 1e6 ? `${step / 1e6} M` : step >= 1e4 ? `${step / 1e3} k` : step.toLocaleString("en");

function pairs(id, values) {
  one(id).replaceChildren(...Object.entries(values).map(([name, value]) => {
    const row = element("div");
    row.append(element("dt", name), element("dd", value));
    return row;
  }));
}

function table(id, heads, rows) {
  const line = (kind, cells) => {
    const made = element("tr");
    made.append(...cells.map((cell) => element(kind, cell)));
    return made;
  };
  one(id).replaceChildren(line("th", heads), ...rows.map((row) => line("td", row)));
}

// ---- curves ----

function merge(into, news) {
  for (const [name, part] of Object.entries(news)) {
    const have = into[name] || { step: [], mean: [], low: [], high: [] };
    let keep = have.step.length;
    while (keep > 0 && have.step[keep - 1] >= part.from) keep--;
    if (part.from === 0) keep = 0;
    for (const column of ["step", "mean", "low", "high"]) have[column] = have[column].slice(0, keep).concat(part[column]);
    into[name] = have;
  }
}

// A tick at every death, join, roll-back, skipped step and finding of an audit; those of joins are below, as one often follows a death
const tickColour = { loss: "bad", join: "server", back: "bad", skip: "aggregator", audit: "bad" };
function ticks(plot) {
  const { ctx, bbox } = plot, paints = { other: colour("dim") };
  for (const [kind, name] of Object.entries(tickColour)) paints[kind] = colour(name);
  ctx.save();
  for (const mark of run.marks) {
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const top = bbox.top + (mark.kind === "join" ? 8 : 0) * devicePixelRatio;
    ctx.strokeStyle = paints[mark.kind] || paints.other;
    ctx.lineWidth = Math.max(1, devicePixelRatio);
    ctx.beginPath();
    ctx.moveTo(x + .5, top);
    ctx.lineTo(x + .5, top + 8 * devicePixelRatio);
    ctx.stroke();
  }
  ctx.restore();
}

function chart(name, data, more) {
  const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
  const values = (_, value) => number(value);
  const series = [{ label: "step" }, { label: "low", stroke: colour("standby"), width: 1, value: values },
    { label: "high", stroke: colour("standby"), width: 1, value: values }, { label: "mean", stroke: colour("computing"), width: 1.5, value: values }];
  if (more) series.splice(1, 3, { label: name, stroke: colour("server"), width: 1.5, points: { show: true, size: 5 }, value: values });
  const box = element("div");
  one("charts").append(box);
  return new uPlot({
    title: name, width: Math.max(200, box.clientWidth), height: 220, series,
    bands: more ? [] : [{ series: [2, 1], fill: colour("standby") + "44" }],
    scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, all) => all.map(short) }, { ...axis, size: 64, values: (_, all) => all.map(number) }],
    cursor: { sync: { key: "steps" } }, legend: { live: true }, hooks: { draw: [ticks] },
  }, data, box);
}

function drawCurves(changed, part, more) {
  for (const name of Object.keys(changed)) {
    const key = `${part} ${name}`, points = run[part][name];
    const data = more ? [points.step, points.mean] : [points.step, points.low, points.high, points.mean];
    if (charts[key]) charts[key].setData(data);
    else charts[key] = chart(name, data, more);
  }
}

function fitCharts() {
  for (const plot of Object.values(charts)) plot.setSize({ width: Math.max(200, plot.root.parentElement.clientWidth), height: 220 });
}

function forgetCharts() {
  for (const name of Object.keys(charts)) { charts[name].destroy(); delete charts[name]; }
  one("charts").replaceChildren();
}

// ---- members ----

function drawMembers() {
  const box = one("members"), canvas = box.firstElementChild, rows = run.members, names = rows.length <= 60;
  const height = rows.length > 200 ? 3 : rows.length > 60 ? 6 : 18, width = box.clientWidth, left = names ? 96 : 0;
  canvas.style.height = `${Math.max(1, rows.length * height)}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = Math.max(1, rows.length * height) * devicePixelRatio;
  const ctx = canvas.getContext("2d"), gap = height > 5 ? 2 : 0;
  ctx.scale(devicePixelRatio, devicePixelRatio);
  ctx.font = "12px system-ui, sans-serif";
  const paints = Object.fromEntries(["computing", "standby", "server", "aggregator", "gone"].map((name) => [name, colour(name)]));
  const text = colour("text"), first = Math.min(...rows.map((row) => row.spans[0][0]), run.now);
  const place = (t) => left + (t - first) / Math.max(1e-6, run.now - first) * (width - left);
  rows.forEach((row, i) => {
    row.spans.forEach(([t, state], j) => {
      const end = j + 1 < row.spans.length ? row.spans[j + 1][0] : run.now;
      ctx.fillStyle = paints[state];
      const x = j + 1 < row.spans.length ? place(t) : Math.min(place(t), width - 4); // what it is now is always seen
      ctx.fillRect(x, i * height, Math.max(1, place(end) - x), height - gap);
    });
    if (names) { ctx.fillStyle = text; ctx.fillText(row.id, 0, i * height + 13); }
  });
  drawLegend();
}

// How many are what now; in a large job no names fit, and the pointer asks for one.
function drawLegend() {
  const counts = {};
  for (const row of run.members) counts[row.spans.at(-1)[1]] = (counts[row.spans.at(-1)[1]] || 0) + 1;
  for (const name of document.querySelectorAll("#states i"))
    name.nextSibling.textContent = `${name.className === "gone" ? "left" : name.className}${counts[name.className] ? ` (${counts[name.className].toLocaleString("en")})` : ""} `;
}

one("members").addEventListener("mousemove", (event) => {
  const canvas = one("members").firstElementChild, box = canvas.getBoundingClientRect();
  const row = run.members[Math.floor((event.clientY - box.top) / box.height * run.members.length)];
  one("members").title = row ? `${row.id}: ${row.spans.map(([t, state]) => `${state} from ${seconds(t)}`).slice(-4).join(", ")}` : "";
});

// ---- machines and links ----

const percent = (share) => `${Math.round(100 * share)} %`;
const mega = (rate) => rate >= 5e6 ? `${(rate / 1e6).toFixed(0)}` : `${(rate / 1e6).toFixed(1)}`;

// Shares in percent over time, as a line.
function spark(values) {
  const canvas = element("canvas"), ctx = canvas.getContext("2d"), wide = 80, high = 16, scale = devicePixelRatio;
  canvas.width = wide * scale; canvas.height = high * scale;
  canvas.className = "spark";
  ctx.scale(scale, scale);
  ctx.strokeStyle = colour("computing");
  ctx.beginPath();
  values.forEach((value, i) => ctx.lineTo(wide - (values.length - i) * 2, high - 1 - (high - 2) * value / 100));
  ctx.stroke();
  const cell = element("td");
  cell.append(canvas, element("span", ` ${values.at(-1)} %`));
  return cell;
}

function gpusOf(gpus) {
  const sum = (i) => gpus.reduce((all, gpu) => all + gpu[i], 0);
  return gpus.length ? `${gpus.length} × ${percent(sum(0) / gpus.length)}, ${bytes(sum(1))} of ${bytes(sum(2))}` : "";
}

function drawHosts({ hosts, more }) {
  const gpus = hosts.some((host) => host.gpus.length);
  const heads = ["machine", "members", "processor", "memory", "theirs", "disk MB/s", "network MB/s", "waited for data", ...(gpus ? ["GPUs"] : [])];
  const rows = hosts.map((host) => {
    const line = element("tr");
    line.append(element("td", host.name), element("td", String(host.members)), spark(host.cpu), spark(host.memory),
      element("td", `${host.own_cpu.toFixed(1)} cores, ${bytes(host.own_memory)}`),
      element("td", host.disk.map(mega).join(" in, ") + " out"), element("td", host.network.map(mega).join(" out, ") + " in"),
      element("td", percent(host.waited)));
    if (gpus) line.append(element("td", gpusOf(host.gpus)));
    return line;
  });
  if (more) { const line = element("tr"); line.append(element("td", `and ${more} more`)); rows.push(line); }
  const head = element("tr");
  head.append(...heads.map((name) => element("th", name)));
  one("hosts").replaceChildren(head, ...rows);
  one("hosts-part").hidden = !hosts.length;
}

function drawLinks({ rows, columns, cells, members }) {
  const most = Math.max(1, ...cells.flat().filter(Boolean).map((cell) => cell[1] + cell[2])), bits = (rate) => number(rate * 8e-6);
  const head = element("tr");
  const left = [members[0] - rows.length, members[1] - columns.length];
  head.append(element("th", left[0] || left[1] ? `${left[0] + left[1]} with less are not shown` : ""), ...columns.map((name) => element("th", name)));
  one("links").replaceChildren(head, ...rows.map((name, i) => {
    const line = element("tr");
    line.append(element("th", name), ...cells[i].map((cell) => {
      const made = element("td", cell ? `${bits(cell[1])} / ${bits(cell[2])}` : "");
      if (cell) {
        made.style.background = `color-mix(in srgb, var(--computing) ${Math.round(45 * (cell[1] + cell[2]) / most)}%, transparent)`;
        made.title = cell[0] ? `round trip ${(1000 * cell[0]).toFixed(2)} ms` : "";
      }
      return made;
    }));
    return line;
  }));
  one("links-part").hidden = !rows.length;
}

// ---- the rest ----

function drawHead() {
  const plan = run.plan || {}, steps = plan.steps || 0, last = (name) => (run.curves[name] || { mean: [] }).mean.at(-1);
  const status = one("status");
  status.textContent = run.read !== undefined ? `reading the log: ${Math.round(run.read * 100)} %`
    : run.ended ? run.ended + (run.why ? `: ${run.why}` : "") : run.plan ? "running" : "waiting for members";
  status.className = run.ended === "failed" ? "bad" : "";
  one("progress").max = steps || 1;
  one("progress").value = run.step;
  document.title = `${steps ? Math.round(100 * run.step / steps) + " % " : ""}${(run.facts || {}).name || "Rallypoint"}`;
  const rate = run.times.p50 ? plan.items / run.times.p50 : 0;
  const left = run.ended || !steps || !run.times.p50 ? "" : seconds((steps - run.step) * run.times.p50);
  const figures = run.plan && !steps && plan.loss !== "never" ? { sums: (run.sums || 0).toLocaleString("en") }
    : { step: `${run.step.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}`, loss: number(last("loss")) };
  if (last("lr") !== undefined) figures.lr = number(last("lr"));
  for (const [name, curve] of Object.entries(run.evaluations)) figures[name] = number(curve.mean.at(-1));
  if (rate) figures[`${plan.item || "samples"}/s`] = Math.round(rate).toLocaleString("en");
  if (left) figures.left = left;
  pairs("figures", figures);
}

function drawTimes() {
  const t = run.times, shown = { "p50 of a step": seconds(t.p50), "p99": seconds(t.p99),
    goodput: `${(100 * t.goodput).toFixed(1)} %`, stalls: String(t.stalls) };
  const last = run.stalled && run.stalled.step === t.longest.step && Math.abs(run.stalled.seconds - t.longest.seconds) < .01; // then they are the same
  if (t.stalls && !last) shown["longest stall"] = `${seconds(t.longest.seconds)} at step ${t.longest.step}: ${t.longest.cause}`;
  if (run.stalled) shown[last ? "longest stall" : "last stall"] = `${seconds(run.stalled.seconds)} at step ${run.stalled.step}: ${run.stalled.text || "nobody said why"}`;
  for (const [cause, lost] of Object.entries(t.lost)) shown[`lost to ${cause}`] = seconds(lost);
  const ledger = run.ledger, whole = (n) => n.toLocaleString("en");
  shown["updates made"] = whole(ledger.updates);
  if (ledger.used) shown[`${(run.plan || {}).item || "samples"} used`] = whole(ledger.used);
  shown["work done twice"] = `${whole(run.again)} contributions`;
  if (ledger.applied !== undefined) shown["contributions (of the first shard)"] = `${whole(ledger.applied)} applied`
    + ["folded", "dropped", "repeats"].filter((what) => ledger[what]).map((what) => `, ${whole(ledger[what])} ${what}`).join("");
  if (ledger.staleness && ledger.staleness[1]) shown.staleness = `${number(ledger.staleness[0])} updates in the mean, at most ${ledger.staleness[1]}`;
  for (const [what, count] of Object.entries(run.skipped)) shown[`${what} skipped`] = String(count);
  pairs("times", shown);
  const slow = Object.entries(run.late).sort((a, b) => b[1] - a[1]).slice(0, 10);
  table("late", ["worker", "behind the first"], slow.map(([name, late]) => [name, seconds(late)]));
}

function drawFacts() {
  const plan = run.plan || {};
  const shown = { ...(run.facts || {}).settings };
  if (plan.words) shown.parameters = plan.words.toLocaleString("en");
  if (plan.replicas) shown.replicas = String(plan.replicas);
  if (plan.shards) shown.shards = String(plan.shards);
  pairs("facts", shown);
}

one("resolved-part").addEventListener("toggle", async () => {
  if (!one("resolved-part").open) return;
  const settings = await (await ask("settings")).json().catch(() => ({}));
  pairs("resolved", Object.keys(settings).length ? settings : { "not known yet": "the members have not agreed on them" });
});

function take(news) {
  if (news.facts) { // the first of a stream: this page, or the server, has begun anew
    run.curves = {}; run.evaluations = {}; run.marks = []; run.members = [];
    forgetCharts();
  }
  const { curves, evaluations, ...rest } = news;
  delete run.read;
  Object.assign(run, rest);
  merge(run.curves, curves);
  merge(run.evaluations, evaluations);
  const before = Object.keys(charts).length;
  drawCurves(curves, "curves", false);
  drawCurves(evaluations, "evaluations", true);
  if (Object.keys(charts).length > before) fitCharts(); // the grid has other columns now
  if (news.marks) for (const plot of Object.values(charts)) plot.redraw(false);
  if (news.facts) one("name").textContent = news.facts.name;
  drawHead();
  drawTimes();
  drawMembers();
  if (news.machines) { drawHosts(news.machines); drawLinks(news.machines.links); }
  if (news.facts || news.plan) drawFacts();
  if (news.snapshots) run.stored = news.snapshots;
  if (run.stored) table("snapshots", ["version", "size", "took", "age"],
    run.stored.slice(-8).reverse().map((s) => [String(s.version), bytes(s.nbytes), seconds(s.seconds), seconds(run.now - s.t)]));
  if (news.sentences || news.marks) {
    const said = [...(run.sentences || []), ...run.marks].sort((a, b) => b.t - a.t).slice(0, 300);
    one("sentences").replaceChildren(...said.map((what) => {
      const line = element("li");
      line.append(element("time", seconds(what.t)), element("span", what.text));
      return line;
    }));
  }
}

// Marks for who measures: when the first news that is whole had come, and when a frame has shown it.
function measured(draw, news) {
  const first = news.read === undefined && !performance.getEntriesByName("came").length;
  if (first) performance.mark("came");
  draw(news);
  if (first) requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
}

// (An EventSource sends no header.)
async function listen() {
  try {
    const answer = await ask("news");
    if (answer.status === 403) {
      one("status").textContent = await answer.text();
      one("status").className = "bad";
      return;
    }
    if (answer.ok) await read(answer, (news) => measured(take, news));
  } catch { } // the connection has ended
  if (run.ended) { // a page that the run itself has served ends with it
    one("status").textContent += " (`rallypoint watch` opens this page again)";
    return;
  }
  one("status").textContent = "not connected: have the run and its page been ended? trying again ...";
  one("status").className = "bad";
  setTimeout(listen, 3000);
}
listen();

let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    fitCharts();
    if (run.now !== undefined) drawMembers();
  }, 100);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
