"use strict";
// Asks for the engine's figures once a second and draws what changed since; the first answer brings the last hour. All
// times are seconds, on the clock of the engine's machine; counters and histograms come as totals since its start, so
// rates are differences here.

const PERIOD = 1000; // ms between questions
const KEPT = 3600; // seconds that the charts can show
const HOLE = 15; // seconds without figures that no line is drawn across
const WINDOW = 60; // seconds that percentiles look at
const TIMELINE = 10; // seconds of steps
const SHORTEST = 60; // seconds that a chart's axis has at least, if it ever has that many
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900]; // seconds between numbers of an axis of time
const UNKNOWN = "the limit of this device is not known";

const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let history = []; // the newest figures and those shortly before, oldest first, of the engine that lives now
let steps = []; // [at, seconds, limit, decode rows, prefill rows, tokens]
let charts = [];
let tiles = new Map();
let asking = false;

// ---- numbers ---------------------------------------------------------------------------------------------------------

function say(value, digits = 3) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}
const percent = (share) => (share === null || share === undefined ? "–" : (100 * share).toFixed(share < 0.1 ? 1 : 0) + " %");
const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : say(1000 * seconds) + " ms");
const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// The newest figures that are at least `age` seconds older than `now`, or the oldest there are.
function earlier(now, age) {
  let found = history[0];
  for (const figures of history) {
    if (figures.at > now.at - age) break;
    found = figures;
  }
  return found;
}

function rate(now, before, name) {
  const seconds = now.at - before.at;
  return seconds > 0 ? (now.counters[name] - before.counters[name]) / seconds : null;
}

// Values below which these shares of what came between two figures lie, as straight lines inside buckets.
function quantiles(now, before, name, shares) {
  const bounds = now.bounds[name];
  const counts = now.histograms[name].map((count, i) => count - before.histograms[name][i]);
  const total = counts.reduce((a, b) => a + b, 0);
  return shares.map((share) => {
    if (total <= 0) return null;
    let left = share * total;
    for (let i = 0; i < counts.length; i++) {
      if (counts[i] > 0 && left <= counts[i]) {
        if (i >= bounds.length) return bounds[bounds.length - 1];
        const low = i > 0 ? bounds[i - 1] : 0;
        return low + ((bounds[i] - low) * left) / counts[i];
      }
      left -= counts[i];
    }
    return bounds[bounds.length - 1];
  });
}

function headroom(newest) {
  const time = newest.reduce((sum, step) => sum + step[1], 0);
  const limit = newest.reduce((sum, step) => sum + step[2], 0);
  return time > 0 && limit > 0 ? limit / time : null;
}

// A time before now, in minutes where the axis begins long ago.
function ago(t, first) {
  if (t === 0) return "now";
  return first < -120 ? `${Number((t / 60).toFixed(1))} min` : `${Number(t.toFixed(1))} s`;
}

// ---- charts ----------------------------------------------------------------------------------------------------------

const WHOLE = [1, 2, 5].flatMap((n) => [n, 10 * n, 100 * n, 1000 * n, 10000 * n]).sort((a, b) => a - b);
const DASHES = [[], [6, 3], [2, 3]];
const COLORS = ["--one", "--two", "--three"];

class Chart {
  // series: [label, unit]; drawn against seconds before now. `unit` stands at each number of the axis.
  // `span` is how many seconds, if not as many as the reader chooses. `paint` draws instead of lines.
  constructor(title, note, series, { unit = series[0][1], wide = false, span = null, top = null, whole = false, paint = null } = {}) {
    this.title = title;
    this.series = series;
    this.span = span;
    this.rows = []; // [at, ...values]
    const figure = document.createElement("figure");
    figure.className = wide ? "wide" : "";
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    const small = document.createElement("small");
    small.textContent = note;
    caption.append(small);
    this.note = small;
    this.box = document.createElement("div");
    this.box.setAttribute("role", "img");
    figure.append(caption, this.box);
    $("charts").append(figure);
    const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width: this.width(),
        height: 190,
        cursor: { drag: { x: false, y: false } },
        scales: {
          x: { time: false, range: () => [-this.shown(), 0] },
          y: { range: (_, low, high) => [0, top ?? Math.max((paint ? this.highest() : high) * 1.1, 1e-3)] },
        },
        axes: [
          { ...axis, size: 32, incrs: TICKS, values: (u, ticks) => ticks.map((t) => ago(t, u.scales.x.min)) },
          { ...axis, size: 92, incrs: whole ? WHOLE : undefined, values: (_, ticks) => ticks.map((t) => `${say(t)} ${unit}`) },
        ],
        series: [
          { label: "at", value: (_, t) => (t === null ? "now" : ago(t, t)) },
          ...series.map(([label, unit], i) => ({
            label,
            stroke: () => color(COLORS[i]),
            fill: paint ? () => color(COLORS[i]) : undefined,
            dash: DASHES[i],
            width: 2,
            spanGaps: false,
            paths: paint ? () => null : undefined,
            points: { show: false },
            value: (u, v, s, at) => this.value(i, at === null ? this.latest(i) : v),
          })),
        ],
        hooks: paint ? { draw: [(u) => paint(u, this)] } : {},
      },
      [[], ...series.map(() => [])],
      this.box,
    );
    new ResizeObserver(() => this.plot.setSize({ width: this.width(), height: 190 })).observe(figure);
  }

  // Seconds on the axis: at first there is little to show.
  shown() {
    const known = this.rows.length ? this.now - this.rows[0][0] : 0;
    return Math.min(this.span ?? Number($("span").value), Math.max(known, SHORTEST));
  }

  highest() {
    return this.rows.reduce((most, [, lower, upper]) => Math.max(most, lower + upper), 0);
  }

  width() {
    return Math.max(200, this.box.parentElement.clientWidth - 24);
  }

  latest(i) {
    return this.rows.length ? this.rows[this.rows.length - 1][i + 1] : null;
  }

  value(i, v) {
    const shown = say(v);
    return shown === "–" ? shown : `${shown} ${this.series[i][1]}`.trim();
  }

  add(at, values) {
    this.rows.push([at, ...values]);
  }

  draw(now) {
    this.now = now;
    this.rows = this.rows.filter((row) => row[0] > now - (this.span ?? KEPT) - 1);
    const columns = [this.rows.map((row) => row[0] - now)];
    this.series.forEach((_, i) => columns.push(this.rows.map((row) => row[i + 1])));
    this.plot.setData(columns);
    const words = this.series.map(([label], i) => `${label} ${this.value(i, this.latest(i))}`);
    this.box.setAttribute("aria-label", `${this.title}. Now: ${words.join(", ")}.`);
  }
}

// Each step as wide as it took; its decode rows below, its prefill rows above. White between steps is the host's time.
function paintSteps(u, chart) {
  const context = u.ctx;
  const floor = u.valToPos(0, "y", true);
  const { left, top, width, height } = u.bbox;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  for (const [at, decode, prefill, seconds] of chart.rows) {
    const from = Math.round(u.valToPos(at - seconds - chart.now, "x", true));
    const to = Math.max(Math.round(u.valToPos(at - chart.now, "x", true)), from + 1);
    const middle = u.valToPos(decode, "y", true);
    const high = u.valToPos(decode + prefill, "y", true);
    context.fillStyle = color("--one");
    context.fillRect(from, middle, to - from, floor - middle);
    context.fillStyle = color("--two");
    context.fillRect(from, high, to - from, middle - high);
  }
  context.restore();
}

function makeCharts() {
  const tail = "p50, p90, p99 of the last minute";
  charts = {
    tokens: new Chart("Throughput", "tokens per second", [["generated", "tokens/s"], ["prompt", "tokens/s"]]),
    ttft: new Chart("Time to first token", tail, [["p50", "ms"], ["p90", "ms"], ["p99", "ms"]]),
    itl: new Chart("Inter-token latency", tail, [["p50", "ms"], ["p90", "ms"], ["p99", "ms"]]),
    queue: new Chart("Requests", "running and waiting", [["running", "requests"], ["waiting", "requests"]], { whole: true }),
    cache: new Chart("KV cache", "% of blocks in use, % of prompt tokens found", [["used", "%"], ["prefix hits", "%"]], { top: 100 }),
    limit: new Chart("Headroom", "hardware limit ÷ step time, %", [["of the limit", "%"]], { top: 100 }),
    steps: new Chart("The running batch", "rows of each step, as wide as it took", [["decode", "rows"], ["prefill", "rows"]], {
      wide: true,
      whole: true,
      span: TIMELINE,
      paint: paintSteps,
    }),
    times: new Chart("Step time", "beside the least it could take", [["step", "ms"], ["limit", "ms"]], {
      wide: true,
      span: TIMELINE,
    }),
  };
}

// ---- experts ---------------------------------------------------------------------------------------------------------

const HOT = 4; // times the mean of a layer, from which on a cell has the full colour
const CELL = 14; // the most pixels of a row
let heat = null; // {layers, ratios: a row for each layer, each: experts of a cell, experts: of the largest layer}

// Tokens of each cell since `before`, or since the start where nobody ran in between, divided by the mean of the layer.
function ratios(now, before) {
  return now.tokens.map((row, i) => {
    const since = row.map((count, e) => count - (before?.tokens[i]?.[e] ?? 0));
    const counts = since.some((count) => count > 0) ? since : row;
    const cells = Math.ceil(now.experts[i] / now.each);
    const mean = counts.reduce((a, b) => a + b, 0) / cells;
    return counts.slice(0, cells).map((count) => (mean > 0 ? count / mean : 0));
  });
}

function expertName(e) {
  const [first, last] = [e * heat.each, Math.min((e + 1) * heat.each, heat.experts) - 1];
  return first === last ? `expert ${first}` : `experts ${first} to ${last}`;
}

function showExperts(now, before) {
  $("experts").hidden = !now;
  if (!now) return;
  heat = { layers: now.layers, each: now.each, experts: Math.max(...now.experts), ratios: ratios(now, before) };
  paintHeat();
  const cells = heat.ratios.flatMap((row, i) => row.map((ratio, e) => [ratio, i, e]));
  const [most, i, e] = cells.reduce((a, b) => (b[0] > a[0] ? b : a));
  const idle = cells.filter(([ratio]) => ratio === 0).length;
  const busiest = most > 0 ? `${expertName(e)} of layer ${heat.layers[i]}, ${say(most)} times the mean` : "none yet";
  $("heat").setAttribute("aria-label", `Tokens by layer and expert. Busiest: ${busiest}. Without tokens: ${say(idle)} of ${say(cells.length)}.`);
  tile("Experts", say(Math.max(...now.imbalance)), "busiest ÷ mean, worst layer");
  const reached = now.reached.reduce((a, b) => a + b, 0) / now.reached.length;
  tile("Reached", say(reached), `of ${say(Math.max(...now.experts))} experts a layer in one step, 0 tokens dropped`);
}

const rgb = (name) => [1, 3, 5].map((i) => parseInt(color(name).slice(i, i + 2), 16));

// From the card's own colour to the first line's.
function shade(ratio, from, to) {
  const part = Math.min(ratio / HOT, 1);
  return `rgb(${from.map((low, i) => Math.round(low + (to[i] - low) * part)).join(" ")})`;
}

function paintHeat() {
  if (!heat) return;
  const canvas = $("heat");
  const columns = Math.max(...heat.ratios.map((row) => row.length));
  const wide = Math.max(1, Math.floor((canvas.clientWidth * devicePixelRatio) / columns));
  const high = Math.max(2, Math.min(CELL, Math.floor(420 / heat.ratios.length)));
  [canvas.width, canvas.height] = [columns * wide, heat.ratios.length * high];
  canvas.style.height = `${canvas.height}px`;
  const [context, from, to] = [canvas.getContext("2d"), rgb("--card"), rgb("--one")];
  heat.ratios.forEach((row, i) => {
    row.forEach((ratio, e) => {
      context.fillStyle = shade(ratio, from, to);
      context.fillRect(e * wide, i * high, wide, high);
    });
  });
  const key = $("heat-key").getContext("2d");
  for (let x = 0; x < 120; x++) {
    key.fillStyle = shade((HOT * x) / 119, from, to);
    key.fillRect(x, 0, 1, 12);
  }
}

function pointAt(event) {
  const box = $("heat").getBoundingClientRect();
  const i = Math.floor(((event.clientY - box.top) / box.height) * heat.ratios.length);
  const e = Math.floor(((event.clientX - box.left) / box.width) * Math.max(...heat.ratios.map((row) => row.length)));
  const ratio = heat.ratios[i]?.[e];
  $("heat-at").textContent = ratio === undefined ? "" : `layer ${heat.layers[i]}, ${expertName(e)}: ${say(ratio)}`;
}

// ---- tiles and table -------------------------------------------------------------------------------------------------

function tile(name, value, more = "") {
  if (!tiles.has(name)) {
    const box = document.createElement("div");
    const parts = ["dt", "dd", "dd"].map((tag) => box.appendChild(document.createElement(tag)));
    parts[0].textContent = name;
    parts[2].className = "more";
    $("tiles").append(box);
    tiles.set(name, parts);
  }
  const [, first, second] = tiles.get(name);
  if (first.textContent !== value) first.textContent = value;
  if (second.textContent !== more) second.textContent = more;
}

function row(request) {
  const line = document.createElement("tr");
  const [first] = request.completions;
  const each = request.completions;
  const span = (name) => {
    const known = each.map((c) => c[name]).filter((v) => v !== null && v !== undefined);
    return known.length ? say(1000 * Math.max(...known)) : "–";
  };
  const cells = [
    request.id,
    say(request.prompt_tokens),
    say(first.cached_tokens),
    say(each.reduce((sum, c) => sum + c.output_tokens, 0)),
    span("queue"), span("prefill"), span("decode"), span("host_gaps"), span("total"),
    [...new Set(each.map((c) => c.finish_reason ?? "running"))].join(", "),
  ];
  for (const text of cells) {
    line.append(Object.assign(document.createElement("td"), { textContent: text }));
  }
  line.firstChild.title = request.id;
  return line;
}

function showRequests(requests) {
  if (requests && requests.length) $("requests").replaceChildren(...requests.map(row));
}

// ---- what each answer changes ----------------------------------------------------------------------------------------

function banner(text) {
  $("banner").hidden = !text;
  if ($("banner").textContent !== text) $("banner").textContent = text;
}

function state(word, kind) {
  if ($("state").textContent !== word) $("state").textContent = word;
  $("state").className = kind;
}

function show(answer) {
  $("about").textContent = [answer.model, answer.device, answer.dtype, "v" + answer.version].filter(Boolean).join(" · ");
  showRequests(answer.requests);
  if (!answer.up) {
    banner("The engine is down; below are its last figures. It is awaited.");
    state("engine down", "down");
  } else if (answer.draining) {
    banner("The server is shutting down: what runs is finished, nothing new is taken.");
    state("draining", "down");
  } else if (!answer.healthy) {
    banner("Requests run, and no step has finished for a while.");
    state("stalled", "down");
  } else {
    banner("");
    state("up", "up");
  }
  if (answer.past) for (const point of unpack(answer.past)) add(point);
  if (answer.figures) take(answer.figures, answer);
  else if (history.length) draw(history[history.length - 1].at);
}

function take(now, answer) {
  if (!add(now)) return showTiles(history[history.length - 1], answer); // an engine that is down, or asked too early
  for (const [at, seconds, limit, decode, prefill] of now.steps) {
    charts.steps.add(at, [decode, prefill, seconds]);
    charts.times.add(at, [1000 * seconds, limit > 0 ? 1000 * limit : null]);
  }
  if (now.steps.length) {
    const known = headroom(now.steps) !== null;
    charts.limit.note.textContent = known ? "hardware limit ÷ step time, %" : UNKNOWN;
    charts.times.note.textContent = known ? "beside the least it could take" : UNKNOWN;
  }
  steps = [...steps, ...now.steps].slice(-4096);
  showTiles(now, answer);
  showExperts(now.experts, earlier(now, WINDOW).experts);
  draw(now.at);
}

function draw(now) {
  for (const chart of Object.values(charts)) chart.draw(now);
}

// Gives the charts one more point. False if it is none: nothing is new.
function add(now) {
  const last = history[history.length - 1];
  const replaced = last && Math.abs(now.started - last.started) > 0.01;
  if (last && !replaced && now.at <= last.at) return false;
  if (last && (replaced || now.at - last.at > HOLE)) {
    for (const chart of Object.values(charts)) chart.add(Math.min(now.at, last.at + 1), chart.series.map(() => null));
  }
  if (replaced) {
    history = [];
    steps = [];
  }
  history = [...history.filter((figures) => figures.at > now.at - 2 * WINDOW), now];
  addToCharts(now);
  return true;
}

// The figures that the past has of each point, which are less than those of now. Rows are differences to the one before.
function* unpack({ counters, bounds, rows }) {
  const sums = [];
  for (const row of rows) {
    row.forEach((more, i) => (sums[i] = (sums[i] ?? 0) + more));
    const [at, started, running, waiting, pages_used, num_pages, time, limit, ...rest] = sums;
    const counts = Object.fromEntries(counters.map((name) => [name, rest.shift()]));
    const histograms = Object.entries(bounds).map(([name, { length }]) => [name, rest.splice(0, length + 1)]);
    yield {
      at: at / 1000, started: started / 1000, running, waiting, pages_used, num_pages,
      step_seconds: time / 1e6, limit_seconds: limit / 1e6,
      counters: counts, bounds, histograms: Object.fromEntries(histograms), experts: null,
    };
  }
}

function addToCharts(now) {
  const before = earlier(now, 1.5);
  const minute = earlier(now, WINDOW);
  const milli = (values) => values.map((v) => (v === null ? null : 1000 * v));
  const shares = [0.5, 0.9, 0.99];
  charts.tokens.add(now.at, [rate(now, before, "generation_tokens"), rate(now, before, "prompt_tokens")]);
  charts.ttft.add(now.at, milli(quantiles(now, minute, "time_to_first_token_seconds", shares)));
  charts.itl.add(now.at, milli(quantiles(now, minute, "inter_token_latency_seconds", shares)));
  charts.queue.add(now.at, [now.running, now.waiting]);
  const hits = hitRate(now, minute);
  charts.cache.add(now.at, [100 * now.pages_used / now.num_pages, hits === null ? null : 100 * hits]);
  const time = now.step_seconds - before.step_seconds;
  const limit = now.limit_seconds - before.limit_seconds;
  charts.limit.add(now.at, [time > 0 && limit > 0 ? (100 * limit) / time : null]);
}

function hitRate(now, before) {
  const since = (name) => now.counters[name] - before.counters[name];
  return ratio(since("prefix_cache_hits"), since("prefix_cache_queries"));
}

function showTiles(now, answer) {
  const before = earlier(now, 3);
  const minute = earlier(now, WINDOW);
  const [ttft, , slowTtft] = quantiles(now, minute, "time_to_first_token_seconds", [0.5, 0.9, 0.99]);
  const [itl, , slowItl] = quantiles(now, minute, "inter_token_latency_seconds", [0.5, 0.9, 0.99]);
  const live = answer.up;
  tile("Generated", live ? say(rate(now, before, "generation_tokens")) : "0", "tokens/s");
  tile("Prompts", live ? say(rate(now, before, "prompt_tokens")) : "0", "tokens/s");
  tile("Running", live ? say(now.running) : "0", live ? `requests, ${say(now.waiting)} waiting` : "requests");
  tile("KV cache", live ? percent(now.pages_used / now.num_pages) : "–", `${say(now.num_pages)} blocks of ${answer.block_size}`);
  tile("First token", ms(ttft), `p99 ${ms(slowTtft)}`);
  tile("Between tokens", ms(itl), `p99 ${ms(slowItl)}`);
  const share = headroom(steps.slice(-128));
  tile("Headroom", percent(share), share === null ? "limit not known" : "of the hardware limit");
  tile("Prefix hits", percent(hitRate(now, minute)), "of prompt, last minute");
  tile("Preemptions", say(now.counters.preemptions), "times since the start");
  const ended = Object.values(now.finished).reduce((a, b) => a + b, 0);
  tile("Ended", say(ended), `requests, ${say(now.finished.abort ?? 0)} aborted, ${say(now.finished.error ?? 0)} failed`);
  for (const gpu of now.gpus) {
    const memory = `${(gpu.memory_used / 2 ** 30).toFixed(1)} of ${(gpu.memory_total / 2 ** 30).toFixed(0)} GiB`;
    tile(`GPU ${gpu.index}`, percent(gpu.utilization), `${memory}, ${say(gpu.power)} W, ${say(gpu.temperature)} °C`);
  }
}

// ---- asking ----------------------------------------------------------------------------------------------------------

async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const last = history[history.length - 1];
    const asked = new URLSearchParams(location.search); // of several models one
    if (last) asked.set("started", last.started), asked.set("since", last.at);
    const response = await fetch(`dashboard/data?${asked}`, { credentials: "same-origin", cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      banner("The key is not accepted any more; load this page again to give another.");
      state("locked", "down");
    } else if (!response.ok) {
      throw new Error(`status ${response.status}`);
    } else {
      show(await response.json());
    }
  } catch (error) {
    banner(`The server does not answer (${error.message}). It is asked again every second.`);
    state("no answer", "down");
  } finally {
    asking = false;
  }
}

document.addEventListener("visibilitychange", ask);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of Object.values(charts)) chart.plot.redraw();
  paintHeat();
});
$("span").addEventListener("change", () => {
  if (history.length) draw(history[history.length - 1].at);
});
$("heat").addEventListener("pointermove", pointAt);
$("heat").addEventListener("pointerleave", () => ($("heat-at").textContent = ""));
new ResizeObserver(paintHeat).observe($("experts"));
makeCharts();
ask();
setInterval(ask, PERIOD);
