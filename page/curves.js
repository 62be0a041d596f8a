// ---- learning curves ----

const BOX = {width: 300, wide: 480, height: 120, left: 34, right: 6, top: 6, bottom: 18};
// Metrics that are shares: their axis goes from 0 to 1.
const SHARES = /^(eval\/)?(success|score|valid_actions|zero_gradient_groups)/;

// About `most` round numbers from `low` to `high`.
function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(size => size >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

const COLOURED = 6;  // colours of lines
const swatch = (number, textContent) =>
  make("span", {className: `swatch run${number % COLOURED}`, textContent});

// Text of a tick: short, and without digits that say nothing.
function tickText(x) {
  if (x !== 0 && Math.abs(x) < 0.001) return x.toExponential(0);
  if (Math.abs(x) >= 10_000) return `${Number((x / 1000).toPrecision(3))}k`;
  return String(Number(x.toPrecision(3)));
}

// The lines and numbers of a vertical axis. y: value -> its height in the picture.
function scale(values, y, width = BOX.width) {
  const {left, right} = BOX;
  return values.flatMap(value => [
    svg("line", {x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--line)"}),
    svg("text", {x: left - 4, y: y(value) + 3, "text-anchor": "end"}, tickText(value))]);
}

let smoothing = 1;  // the number of steps, the middle one's included, whose mean a curve shows

// The mean over the steps around each. counts: how many trajectories each value is the mean of.
function smooth(values, counts) {
  if (smoothing === 1) return values;
  const half = (smoothing - 1) / 2;
  return values.map((value, place) => {
    if (value === null) return null;
    let [sum, weight] = [0, 0];
    for (let k = Math.max(0, place - half); k <= Math.min(values.length - 1, place + half); k++) {
      if (values[k] === null) continue;
      sum += values[k] * (counts?.[k] ?? 1);
      weight += counts?.[k] ?? 1;
    }
    return sum / weight;
  });
}

function makeSmoothing() {
  const sizes = [1, 5, 15, 45].map(size => [size, size === 1 ? "none" : `${size} steps`]);
  $("smoothing").append(menu("smoothing", sizes, value => {
    smoothing = Number(value);
    drawCurves();
    draw();
  }));
}

// Metrics that are equal have one picture.
function drawCurves() {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.metrics)))];
  const equal = Map.groupBy(names, name => JSON.stringify(runs.map(run => run.metrics[name])));
  $("curves").replaceChildren(...[...equal.values()].map(curve));
  const stages = runs[0].stages;
  $("stages").textContent = stages.length
    ? `dashed: the horizon changes, at step ${stages.join(", ")}` : "";
}

// The curve of a metric, a line for each run that has it. equal: the names of metrics like it.
function curve([name, ...equal]) {
  const lines = runs.map((run, number) => ({name: run.name, number, steps: run.steps,
    values: run.metrics[name]})).filter(line => line.values);
  return plot(name, equal, lines);
}

// lines: [{name, number, steps, values, counts}]; number: of the colour. legend: whether the names
// of the lines are shown.
function plot(name, equal, lines, legend = false) {
  const values = lines.flatMap(line => line.values.filter(value => value !== null));
  const steps = lines.flatMap(line => line.steps);
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (SHARES.test(name) && low >= 0 && high <= 1) [low, high] = [0, 1];
  if (low > 0) low = 0;
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  const first = Math.min(...steps);
  const last = Math.max(...steps, first + 1);

  const {height, left, right, top, bottom} = BOX;
  const width = legend && innerWidth >= 700 ? BOX.wide : BOX.width;
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  for (const line of lines) line.drawn = smooth(line.values, line.counts);
  const ends = lines.map(({name, drawn}) => {
    const finite = drawn.filter(value => value !== null);
    return `${name}: ${short(finite[0])} at first, ${short(finite.at(-1))} at last`;
  });
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}, ${ends.join("; ")}`,
  });
  picture.append(...scale(ticks(low, high, 3), y, width));
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) {
    picture.append(
      svg("text", {x: x(step), y: height - 5, "text-anchor": "middle"}, String(step)));
  }
  for (const step of runs[0].stages) {
    picture.append(svg("line", {
      class: "stage", x1: x(step), x2: x(step), y1: top, y2: height - bottom,
      stroke: "var(--dim)", "stroke-dasharray": "3 3",
    }));
  }
  const line = ({steps, number}, values, opacity) => {
    const points = [];
    for (const [i, value] of values.entries()) {
      if (value !== null) points.push(`${x(steps[i])},${y(value)}`);
    }
    const className = `run${number % COLOURED}`;
    picture.append(svg("polyline", {
      points: points.join(" "), class: className,
      fill: "none", stroke: "var(--run)", "stroke-width": 1.5, opacity,
    }));
    if (points.length === 1) {  // a line needs two
      const [cx, cy] = points[0].split(",");
      picture.append(svg("circle", {cx, cy, r: 2.5, class: className, fill: "var(--run)"}));
    }
  };
  if (smoothing > 1) for (const each of lines) line(each, each.values, .2);
  for (const each of lines) line(each, each.drawn, 1);

  // The value under the cursor, and a line there.
  const cursor = svg("line", {y1: top, y2: height - bottom, stroke: "var(--fg)", opacity: 0});
  picture.append(cursor);
  const range = make("span", {className: "dim"});
  const showRange = () => {
    const finite = lines[0].drawn.filter(value => value !== null);
    const names = lines.map(({name, number}) => swatch(number, name));
    range.replaceChildren(...(legend ? names : lines.length > 1 ? []
      : [`${short(finite[0])} → ${short(finite.at(-1))}`]));
    cursor.setAttribute("opacity", 0);
  };
  const stepAt = event => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * width - left) / (width - left - right);
    const wanted = first + share * (last - first);
    return steps.reduce((best, step) =>
      Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best);
  };
  picture.onpointermove = event => {
    const step = stepAt(event);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("opacity", .5);
    const parts = lines.map(({name, number, steps, drawn}) => {
      const value = drawn[steps.indexOf(step)] ?? null;
      const text = `${legend ? `${name} ` : ""}${value === null ? "none" : short(value)} `;
      return lines.length > 1 ? swatch(number, text) : text;
    });
    range.replaceChildren(`step ${step}: `, ...parts);
  };
  picture.onpointerleave = showRange;
  picture.onclick = event => chooseStep(stepAt(event), hasShift(event));
  showRange();

  const title = make("b", {textContent: name.replaceAll("_", " ")});
  const others = make("span", {className: "dim",
    textContent: equal.map(other => `= ${other.replaceAll("_", " ")} `).join("")});
  return make("figure", {}, make("figcaption", {}, title, others, range), picture);
}

// ---- distributions ----

const BARS = 16;  // bars of a histogram at most

function drawCharts() {
  if (!$("distributions").open) return;
  const charts = [];
  for (const [name, title] of [["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"],
                               ["invalid", "first invalid turn"]]) {
    const values = played(shown).filter(row => row[name] !== null);
    if (values.length) charts.push(histogram(name, title, values));
  }
  const kind = rows.some(row => row.category) ? "category" : "env";
  charts.push(successChart(kind), advantageChart());
  $("charts").replaceChildren(...charts);
}

// How often each value occurs; the part of successes is green. A click filters the table.
function histogram(name, title, held) {
  const values = [...new Set(held.map(row => row[name]))].sort((a, b) => a - b);
  let bins = values.map(value => [value, value]);
  if (values.length > BARS) {
    const low = values[0];
    const whole = values.every(Number.isInteger);
    let size = (values.at(-1) - low) / BARS;
    if (whole) size = Math.ceil(size + 1 / BARS);
    bins = Array.from({length: BARS}, (_, k) =>
      [low + k * size, low + (k + 1) * size - (whole ? 1 : 0)]);
    bins = bins.filter(([from]) => from <= values.at(-1));
  }
  const counts = bins.map(() => [0, 0]);  // not successful, successful
  for (const row of held) {
    let k = bins.findIndex(([from, to]) => row[name] >= from && row[name] <= to);
    if (k < 0) k = bins.length - 1;
    counts[k][row.success ? 1 : 0] += 1;
  }
  const {width, height, left, right, top, bottom} = BOX;
  const most = Math.max(...counts.map(([a, b]) => a + b));
  const y = count => height - bottom - count / most * (height - top - bottom);
  // To scale: a bar stands at its value, and is as wide as the values that are closest allow.
  const span = bins.at(-1)[0] - bins[0][0];
  const gap = Math.min(...bins.slice(1).map(([from], k) => from - bins[k][0]));
  const room = width - left - right;
  const step = span ? Math.max(4, room * gap / (span + gap)) : room / 2;
  const at = bins.map(([from]) => left + (span && (from - bins[0][0]) / span) * (room - step));
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  picture.append(...scale(ticks(0, most, 3).filter(Number.isInteger), y));
  // Which bars have a number below: the tallest first, where there is room.
  const numbered = [];
  const tall = counts.map(([a, b], k) => [a + b, k]).sort(([a], [b]) => b - a);
  for (const [, k] of tall) {
    if (numbered.every(other => Math.abs(at[k] - at[other]) >= 40)) numbered.push(k);
  }
  for (const [k, [from, to]] of bins.entries()) {
    const [failed, succeeded] = counts[k];
    const label = from === to ? short(from) : `${short(from)} to ${short(to)}`;
    const bar = svg("g", {class: "bar"},
      svg("title", {}, `${title} ${label}: ${failed + succeeded}, ${succeeded} of them successful`),
      svg("rect", {x: at[k], y: top, width: step, height: height - top - bottom,
                   fill: "transparent"}),
      svg("rect", {x: at[k] + 1, y: y(failed + succeeded), width: step - 2,
                   height: y(succeeded) - y(failed + succeeded), fill: "var(--dim)"}),
      svg("rect", {x: at[k] + 1, y: y(succeeded), width: step - 2,
                   height: y(0) - y(succeeded), fill: "var(--good)"}));
    bar.onclick = () => setFilter(name, from === to ? String(from) : `${from}..${to}`);
    picture.append(bar);
    if (numbered.includes(k)) {
      picture.append(svg("text", {x: at[k] + step / 2, y: height - 5, "text-anchor": "middle"},
        tickText(from)));
    }
  }
  const note = make("span", {className: "dim", textContent: "green: success"});
  return make("figure", {}, make("figcaption", {}, make("b", {textContent: title}), note), picture);
}

// Success for each category. A click filters the table.
function successChart(kind) {
  const groups = Map.groupBy(played(shown), row => nameOf(row, kind));
  const bars = [...groups].map(([key, held]) => ({key, count: held.length,
    value: mean(held.map(row => Number(row.success))), onclick: () => setFilter(kind, key)}));
  bars.sort((a, b) => b.value - a.value);
  const note = bars.length > 12 ? `12 of ${bars.length}` : "";
  return barChart(`success by ${kind}`, note, bars.slice(0, 12), [0, 1]);
}

// The mean advantage of turns whose action was valid, and of the others.
function advantageChart() {
  const sums = {valid: [0, 0], invalid: [0, 0]};  // sum, number of turns
  for (const {turns, advantage, invalid_count, invalid_advantage} of played(shown)) {
    if (advantage === null || (invalid_count && invalid_advantage === null)) continue;
    const invalid = invalid_count * (invalid_advantage ?? 0);
    sums.invalid[0] += invalid;
    sums.invalid[1] += invalid_count;
    sums.valid[0] += turns * advantage - invalid;
    sums.valid[1] += turns - invalid_count;
  }
  const bars = Object.entries(sums).filter(([, [, count]]) => count).map(([key, [sum, count]]) =>
    ({key: `${count} ${key}`, count, value: sum / count,
      onclick: key === "valid" ? null : () => setFilter("invalid", ">0")}));
  const values = bars.map(bar => bar.value);
  return barChart("advantage of a turn", "mean, by its action", bars,
    [Math.min(0, ...values), Math.max(0, ...values)]);
}

// Horizontal bars from 0. bars: [{key, value, count, onclick}]; low, high: the ends of the scale.
function barChart(name, note, bars, [low, high]) {
  const height = Math.max(1, bars.length) * 16 + 18;
  const {width} = BOX;
  const left = 120;
  const x = value => left + (value - low) / (high - low || 1) * (width - left - 50);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name});
  for (const [k, {key, value, count, onclick}] of bars.entries()) {
    const bar = svg("g", {class: "bar"},
      svg("title", {}, `${key}: ${name.split(" ")[0]} ${short(value)} of ${count}`),
      svg("rect", {x: 0, y: k * 16, width, height: 16, fill: "transparent"}),
      svg("text", {x: left - 4, y: k * 16 + 12, "text-anchor": "end"}, key.slice(0, 22)),
      svg("rect", {x: x(Math.min(0, value)), y: k * 16 + 2, height: 12,
                   width: Math.max(.5, Math.abs(x(value) - x(0))),
                   fill: `var(--${value < 0 ? "bad" : "good"})`}),
      svg("text", {x: width - 44, y: k * 16 + 12}, short(value)));
    bar.onclick = onclick;
    picture.append(bar);
  }
  picture.append(svg("text", {x: left, y: height - 4}, tickText(low)),
    svg("text", {x: width - 52, y: height - 4}, tickText(high)));
  return make("figure", {}, make("figcaption", {}, make("b", {textContent: name}),
    make("span", {className: "dim", textContent: note})), picture);
}
