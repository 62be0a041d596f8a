// ---- learning curves ----

const BOX = {width: 300, height: 120, left: 34, right: 6, top: 6, bottom: 18};
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

// Text of a tick: short, and without digits that say nothing.
function tickText(x) {
  if (x !== 0 && Math.abs(x) < 0.001) return x.toExponential(0);
  if (Math.abs(x) >= 10_000) return `${Number((x / 1000).toPrecision(3))}k`;
  return String(Number(x.toPrecision(3)));
}

// The lines and numbers of a vertical axis. y: value -> its height in the picture.
function scale(values, y) {
  const {width, left, right} = BOX;
  return values.flatMap(value => [
    svg("line", {x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--line)"}),
    svg("text", {x: left - 4, y: y(value) + 3, "text-anchor": "end"}, tickText(value))]);
}

function drawCurves() {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.metrics)))];
  $("curves").replaceChildren(...names.map(curve));
  const stages = runs[0].stages;
  $("stages").textContent = stages.length
    ? `dashed: the horizon changes, at step ${stages.join(", ")}` : "";
}

// The curve of one metric, a line for each run that has it.
function curve(name) {
  const lines = runs.map((run, number) => ({run, number, values: run.metrics[name]}))
    .filter(line => line.values);
  const values = lines.flatMap(line => line.values.filter(value => value !== null));
  const steps = lines.flatMap(line => line.run.steps);
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (SHARES.test(name) && low >= 0 && high <= 1) [low, high] = [0, 1];
  if (low > 0) low = 0;
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  const first = Math.min(...steps);
  const last = Math.max(...steps, first + 1);

  const {width, height, left, right, top, bottom} = BOX;
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  const ends = lines.map(({run, values}) => {
    const finite = values.filter(value => value !== null);
    return `${run.name}: ${short(finite[0])} at first, ${short(finite.at(-1))} at last`;
  });
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}, ${ends.join("; ")}`,
  });
  picture.append(...scale(ticks(low, high, 3), y));
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
  for (const {run, number, values} of lines) {
    const points = [];
    for (const [i, value] of values.entries()) {
      if (value !== null) points.push(`${x(run.steps[i])},${y(value)}`);
    }
    picture.append(svg("polyline", {
      points: points.join(" "), class: `run${number % 4}`,
      fill: "none", stroke: "var(--run)", "stroke-width": 1.5,
    }));
    if (points.length === 1) {  // a line needs two
      const [cx, cy] = points[0].split(",");
      picture.append(
        svg("circle", {cx, cy, r: 2.5, class: `run${number % 4}`, fill: "var(--run)"}));
    }
  }

  // The value under the cursor, and a line there.
  const cursor = svg("line", {y1: top, y2: height - bottom, stroke: "var(--fg)", opacity: 0});
  picture.append(cursor);
  const range = make("span", {className: "dim"});
  const showRange = () => {
    const finite = lines[0].values.filter(value => value !== null);
    range.replaceChildren(lines.length > 1 ? ""
      : `${short(finite[0])} → ${short(finite.at(-1))}`);
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
    const parts = lines.map(({run, number, values}) => {
      const place = run.steps.indexOf(step);
      const text = place < 0 || values[place] === null ? "none" : short(values[place]);
      const className = lines.length > 1 ? `swatch run${number % 4}` : "";
      return make("span", {className}, text, " ");
    });
    range.replaceChildren(`step ${step}: `, ...parts);
  };
  picture.onpointerleave = showRange;
  picture.onclick = event => chooseStep(stepAt(event), event.shiftKey);
  showRange();

  const title = make("b", {textContent: name.replaceAll("_", " ")});
  return make("figure", {}, make("figcaption", {}, title, range), picture);
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
  charts.push(successChart(kind));
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
  const step = (width - left - right) / bins.length;
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  picture.append(...scale(ticks(0, most, 3).filter(Number.isInteger), y));
  const every = Math.ceil(bins.length / 6);
  for (const [k, [from, to]] of bins.entries()) {
    const [failed, succeeded] = counts[k];
    const label = from === to ? short(from) : `${short(from)} to ${short(to)}`;
    const bar = svg("g", {class: "bar"},
      svg("title", {}, `${title} ${label}: ${failed + succeeded}, ${succeeded} of them successful`),
      svg("rect", {x: left + k * step, y: top, width: step, height: height - top - bottom,
                   fill: "transparent"}),
      svg("rect", {x: left + k * step + 1, y: y(failed + succeeded), width: Math.max(1, step - 2),
                   height: y(succeeded) - y(failed + succeeded), fill: "var(--dim)"}),
      svg("rect", {x: left + k * step + 1, y: y(succeeded), width: Math.max(1, step - 2),
                   height: y(0) - y(succeeded), fill: "var(--good)"}));
    bar.onclick = () => setFilter(name, from === to ? String(from) : `${from}..${to}`);
    picture.append(bar);
    if (k % every === 0) {
      picture.append(svg("text", {x: left + (k + .5) * step, y: height - 5,
                                  "text-anchor": "middle"}, tickText(from)));
    }
  }
  const note = make("span", {className: "dim", textContent: "green: success"});
  return make("figure", {}, make("figcaption", {}, make("b", {textContent: title}), note), picture);
}

// Success for each category: a bar from 0 to 1. A click filters the table.
function successChart(kind) {
  const groups = Map.groupBy(played(shown), row => nameOf(row, kind));
  const means = [...groups].map(([key, held]) =>
    [key, mean(held.map(row => Number(row.success))), held.length]);
  means.sort((a, b) => b[1] - a[1]);
  const most = means.slice(0, 12);
  const height = Math.max(1, most.length) * 16 + 18;
  const {width} = BOX;
  const left = 120;
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
                              "aria-label": `success by ${kind}`});
  for (const [k, [key, share, count]] of most.entries()) {
    const bar = svg("g", {class: "bar"},
      svg("title", {}, `${key}: success ${short(share)} of ${count}`),
      svg("rect", {x: 0, y: k * 16, width, height: 16, fill: "transparent"}),
      svg("text", {x: left - 4, y: k * 16 + 12, "text-anchor": "end"}, key.slice(0, 22)),
      svg("rect", {x: left, y: k * 16 + 2, width: Math.max(.5, share * (width - left - 40)),
                   height: 12, fill: "var(--good)"}),
      svg("text", {x: width - 36, y: k * 16 + 12}, short(share)));
    bar.onclick = () => setFilter(kind, key);
    picture.append(bar);
  }
  picture.append(svg("text", {x: left, y: height - 4}, "0"),
    svg("text", {x: width - 42, y: height - 4}, "1"));
  const note = means.length > most.length ? `${most.length} of ${means.length}` : "";
  return make("figure", {}, make("figcaption", {}, make("b", {textContent: `success by ${kind}`}),
    make("span", {className: "dim", textContent: note})), picture);
}
