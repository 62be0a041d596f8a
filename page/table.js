// ---- the table: filters, search, groups ----

const COLUMNS = ["run", "step", "item", "sample", "success", "reward", "turns", "invalid", "status",
                 "env", "category", "advantage", "kl", "logprob", "tokens", "invalid_action",
                 "goal", "last_reply"];
const TITLES = {invalid: "first invalid turn", invalid_action: "first invalid action", env: "world",
                last_reply: "last reply", kl: "KL", logprob: "log-prob",
                colour: "colour of the last action", part: "part of the change"};
const HINTS = {
  invalid: "turn of the first invalid action",
  advantage: "the mean of the turns' advantages",
  kl: "of the step: it is not recorded of each trajectory",
  logprob: "the mean of the sampled tokens: the lower, the less probable were the replies",
  colour: "whether the last action that names a colour names one of the goal's",
  share: "of the trajectories in the table",
  part: "the group's change of success times its share of the two steps' trajectories",
  last_reply: "the end of the last reply",
  status: "how it ended: done, horizon (out of turns), length (out of tokens), env_error",
};
const TEXT = new Set(["category", "item", "status", "env", "last_reply", "goal", "invalid_action",
                      "colour"]);
// Columns that are shown only if the rows differ in them.
const OPTIONAL = ["run", "env", "category", "advantage", "kl", "logprob", "invalid_action", "goal"];
const LINES = 6;  // groups whose curves are drawn
const ANY_INVALID = "(any invalid action)";
const MAX_ROWS = 400;
const MENUS = ["status", "success", "env", "category", "run"];  // columns with a menu
const RANGES = {step: "step: 15-25", reward: "reward: >0.5", turns: "turns: <=3",
                invalid: "invalid: 1"};
const HELP_OF_RANGES = "Numbers: 5 or >0.5 or <=3 or 15-25, or several with commas; the groups of "
  + "two steps (20, 80) are compared.";
const HELP_OF_SEARCH = "Search: pickup & blue: both in a trajectory; /pick ?up (red|blue)/: a "
  + "regular expression.";
const GROUPS = {"": "trajectories", item: "by item", category: "by category", goal: "by goal",
                last_reply: "by last reply", invalid_action: "by invalid action",
                colour: "by colour", step: "by step", status: "by status", run: "by run"};
let order = {by: "step", up: false};
let shown = [];  // rows that pass the filters, in the order shown
let listed = [];  // what the table lists: rows, or groups of rows
let opened = [];  // rows whose trajectories are open: at most two
let groupBy = "";
let found = null;  // what the search has found: Map of row -> snippet; null: no search
const filters = {};  // column -> what its filter says
const items = new Set();  // the ids of all items

const byText = (a, b) => a < b ? -1 : 1;
const title = name => TITLES[name] ?? name;
const nameOf = (row, name) =>
  (name === "run" ? runs[row.run].name : String(row[name] ?? "")) || "(none)";

function columns() {
  const several = name => rows.some(row => row[name] !== rows[0][name]);
  return COLUMNS.filter(name => !OPTIONAL.includes(name) || several(name));
}

// Make the menus and fields above the table. On a live page menus get new values; the fields stay.
let menuValues = "";
function makeFilters() {
  const names = MENUS.filter(name => columns().includes(name));
  const choices = names.map(name =>
    [name, [...new Set(rows.map(row => nameOf(row, name)))].sort(byText)]);
  if (menuValues !== JSON.stringify(choices)) {
    menuValues = JSON.stringify(choices);
    const menus = choices.map(([name, values]) => {
      const options = values.map(value => [value, `${title(name)}: ${value}`]);
      const control = menu(name, [["", `${title(name)}: all`], ...options],
        value => setFilter(name, value));
      control.value = filters[name] ?? "";
      return control;
    });
    $("menus").replaceChildren(...menus);
  }
  if ($("search-line").children.length) return;
  for (const [name, placeholder] of [["item", "item"], ...Object.entries(RANGES)]) {
    const oninput = event => setFilter(name, event.target.value);
    $("filters").append(
      make("input", {placeholder, ariaLabel: name, oninput}));
  }
  $("filters").append(make("button", {textContent: "clear", title: "remove all filters",
    onclick: clearFilters}));
  const text = make("input", {type: "search", placeholder: "search all text: a & b, /regex/",
    title: HELP_OF_SEARCH, ariaLabel: "search", id: "search"});
  const where = menu("search in", [["anything", "in all text"], ["replies", "in replies"],
    ["environment", "in the environment's text"]], () => find());
  text.onchange = () => find();
  text.onsearch = () => find();
  const groups = Object.entries(GROUPS).filter(([name]) => name !== "run" || runs.length > 1);
  const list = menu("group by", groups, value => {
    groupBy = value;
    // What happened most often comes first; items, categories, goals: the least successful.
    const byNumber = ["last_reply", "invalid_action", "colour"].includes(value);
    order = !value ? {by: "step", up: false} : value === "step" ? {by: "step", up: true}
      : {by: byNumber ? "trajectories" : "success", up: !byNumber};
    draw();
  });
  $("search-line").append(text, where, list);
}

function setFilter(name, value) {
  filters[name] = value;
  const control = $("filters").querySelector(`[aria-label=${name}]`);
  if (control && control.value !== value) control.value = value;
  draw();
}

function clearFilters() {
  for (const name in filters) delete filters[name];
  lastSearch += 1;
  found = null;
  $("search").value = $("search-state").textContent = "";
  for (const control of $("filters").querySelectorAll("input, select")) control.value = "";
  draw();
}

// A click on a curve: show a step; with Shift, compare it with the one before.
function chooseStep(step, compare) {
  const before = (filters.step ?? "").split(",")[0].trim();
  if (compare && before) {
    if (!groupBy) {
      groupBy = rows.some(row => row.category) ? "category" : "item";
      $("search-line").querySelector("[aria-label='group by']").value = groupBy;
    }
    setFilter("step", `${before}, ${step}`);
  } else {
    setFilter("step", String(step));
  }
}

// Search, and show what was found and that the search has ended.
let lastSearch = 0;
async function find() {
  lastSearch += 1;
  const call = lastSearch;
  const text = $("search").value;
  const where = document.querySelector("select[aria-label='search in']").value;
  const say = message => {
    if (call === lastSearch) $("search-state").textContent = message;
  };
  let result = null;
  let ending = "";
  if (text.trim()) {
    say("searching");
    try {
      result = await search(text, where, share => say(`searching: ${Math.round(100 * share)} %`));
      const all = rows.filter(isHeld).length;
      ending = `search ended: found in ${result.size} of ${all} trajectories`;
    } catch (error) {
      ending = `cannot be searched: ${error.message}`;
    }
  }
  if (call !== lastSearch) return;  // another search has begun, or the filters were cleared
  say(ending);
  found = result;
  draw();
}

const COMPARE = {
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};
const NUMBER = "(-?\\d*\\.?\\d+(?:e-?\\d+)?)";

// One part of a filter of numbers -> a function of a number; null: it cannot be read.
function readRange(text) {
  const range = text.match(RegExp(`^\\s*${NUMBER}\\s*(?:-|\\.\\.)\\s*${NUMBER}\\s*$`));
  if (range) return x => x >= Number(range[1]) && x <= Number(range[2]);
  const single = text.match(RegExp(`^\\s*([<>]?=?)\\s*${NUMBER}\\s*$`));
  if (!single) return null;
  const [, operator, number] = single;
  // A number as the table shows it: three digits.
  const rounded = value =>
    Number.isInteger(Number(value)) ? Number(value) : Number(Number(value).toPrecision(3));
  return x => COMPARE[operator || "="](rounded(x), rounded(number));
}

// A filter of numbers -> functions, one for each part. Parts that cannot be read are left out.
const readRanges = text => text.split(",").map(readRange).filter(test => test);

// Whether a row passes the filter `text` of the column `name`.
function passes(row, name, text) {
  if (!text) return true;
  if (name === "item") return items.has(text) ? row.item === text : row.item.includes(text);
  if (!(name in RANGES) && name !== "tokens") return nameOf(row, name) === text;
  const tests = readRanges(text);
  if (!tests.length) return true;
  return row[name] !== null && tests.some(test => test(row[name]));
}

// What cannot be read is said, and so are the filters that have no field: a click has set them.
function drawFilters() {
  const wrong = [];
  for (const name in RANGES) {
    const parts = (filters[name] ?? "").split(",").filter(part => part.trim() && !readRange(part));
    $("filters").querySelector(`[aria-label=${name}]`).ariaInvalid = String(parts.length > 0);
    wrong.push(...parts.map(part => `${title(name)}: "${part.trim()}" cannot be read. `));
  }
  const chips = Object.keys(filters).filter(name => filters[name]
    && !$("filters").querySelector(`[aria-label=${name}]`));
  $("forms").replaceChildren(make("span", {className: "bad", textContent: wrong.join("")}),
    `${HELP_OF_RANGES} ${HELP_OF_SEARCH}`, ...chips.map(name => make("button", {
      title: "remove this filter", textContent: `${title(name)}: ${filters[name]} ×`,
      onclick: () => setFilter(name, "")})));
}

// The two parts of the step filter, if there are two: [["20", test], ["80", test]].
function comparedSteps() {
  const parts = (filters.step ?? "").split(",").map(text => [text.trim(), readRange(text)]);
  return parts.length === 2 && parts.every(([, test]) => test) ? parts : null;
}

// ---- drawing the table ----

function draw() {
  const active = Object.entries(filters).filter(([, text]) => text);
  const passing = without => rows.filter(row => (!found || found.has(row))
    && active.every(([name, text]) => name === without || passes(row, name, text)));
  shown = passing();
  const names = groupBy ? drawGroups() : drawTrajectories();
  drawGroupCurves(() => filters.step ? passing("step") : shown);
  $("rows").replaceChildren(...listed.map((row, index) => tableRow(row, index, names)));
  drawFilters();
  drawHead(names);
  markOpened();
  drawCharts();
}

function drawTrajectories() {
  shown.sort(compareRows);
  listed = shown.slice(0, MAX_ROWS);
  const cut = shown.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "";
  const held = rows.filter(isHeld).length;
  const note = held < rows.length ? `; ${held} of them with tokens` : "";
  $("count").textContent = `${shown.length} of ${rows.length}${cut}${note}`;
  const names = columns();
  if (found) names.splice(names.indexOf("sample") + 1, 0, "found");
  return names;
}

// One row for each group of trajectories. With two steps, or parts of the run, in the step filter
// the success of both is shown, and its change.
function drawGroups() {
  const pair = comparedSteps()?.map(([text, test]) => {
    const steps = new Set(shown.map(row => row.step).filter(test));
    const number = shown.reduce((count, row) => count + steps.has(row.step), 0);
    return [text, row => steps.has(row.step), number];
  });
  const groups = [...Map.groupBy(shown, row => nameOf(row, groupBy))];
  listed = groups.map(([key, held]) => {
    const group = {key, trajectories: held.length, share: held.length / shown.length};
    for (const name of MEANS) group[name] = meanOf(held, name);
    group[groupBy] = groupBy === "step" ? Number(key) : key;
    if (pair) {
      let weight = 0;
      for (const [text, test, number] of pair) {
        const part = held.filter(test);
        group[`number, ${text}`] = part.length;
        group[`success, ${text}`] = meanOf(part, "success");
        weight += part.length / number / 2;
      }
      const [before, after] = pair.map(([text]) => group[`success, ${text}`]);
      group.change = before === null || after === null ? null : after - before;
      group.part = group.change === null ? null : group.change * weight;
    }
    return group;
  });
  const compared = pair ? [...pair.flatMap(([text]) => [`number, ${text}`, `success, ${text}`]),
    "change", "part"] : ["success"];
  const names = [groupBy, "trajectories", "share", ...compared, "reward", "turns", "invalid",
    ...["advantage", "kl", "logprob"].filter(name => columns().includes(name)
      && (name !== "kl" || groupBy === "step"))];
  // The group that made a drop comes first.
  if (!names.includes(order.by)) order = {by: pair ? "part" : "success", up: true};
  listed.sort((a, b) => compareBy(a, b) || byText(String(a.key), String(b.key)));
  $("count").textContent = `${listed.length} groups of ${shown.length} trajectories`
    + (listed.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "");
  listed = listed.slice(0, MAX_ROWS);
  return names;
}

// The mean of a column, of the trajectories that have a value and whose environment did not fail.
const MEANS = ["success", "reward", "turns", "invalid", "advantage", "kl", "logprob"];
function meanOf(held, name) {
  let [sum, count] = [0, 0];
  for (const row of held) {
    if (row.status === "env_error" || row[name] === null) continue;
    sum += Number(row[name]);
    count += 1;
  }
  return count ? sum / count : null;
}

// The column by which the table is sorted, or the success, of its first groups over the steps.
let lineOf = new Map();  // key of a group -> the number of its line
function drawGroupCurves(rowsOfAllSteps) {
  lineOf = new Map();
  $("group-curves").replaceChildren();
  if (!groupBy || groupBy === "step") return;
  const isNumber = ["trajectories", "share"].includes(order.by);
  const name = isNumber || MEANS.includes(order.by) ? order.by : "success";
  // How many do not have what the table is about would leave no height for the others.
  const keys = listed.map(group => group.key).filter(key => !isNumber || key !== "(none)");
  // Most invalid actions are rare: all of them together are the first line.
  if (groupBy === "invalid_action" && isNumber) keys.unshift(ANY_INVALID);
  for (const key of keys.slice(0, LINES)) lineOf.set(key, lineOf.size);
  const all = new Map();  // step -> number of trajectories
  const held = [...lineOf].map(() => new Map());  // of each line: step -> trajectories
  for (const row of rowsOfAllSteps()) {
    all.set(row.step, (all.get(row.step) ?? 0) + 1);
    const key = nameOf(row, groupBy);
    for (const name of key === "(none)" ? [key] : [key, ANY_INVALID]) {
      const parts = held[lineOf.get(name)];
      if (parts) parts.set(row.step, [...parts.get(row.step) ?? [], row]);
    }
  }
  const steps = [...all.keys()].sort((a, b) => a - b);
  if (steps.length < 2) {
    lineOf = new Map();
    return;
  }
  const lines = [...lineOf].map(([key, number]) => {
    const parts = steps.map(step => held[number].get(step) ?? []);
    const values = parts.map((part, k) => name === "trajectories" ? part.length
      : name === "share" ? part.length / all.get(steps[k]) : meanOf(part, name));
    const counts = isNumber ? undefined : parts.map(part => part.length);
    return {name: key.slice(0, 40), number, steps, counts, values};
  });
  $("group-curves").append(plot(`${title(name)} by ${title(groupBy)}`, [], lines, true));
}

// The head of the table: a click sorts by the column, a second click reverses the order.
function drawHead(names) {
  const cells = names.map(name => {
    const isOrder = order.by === name;
    const arrow = isOrder ? (order.up ? " ▲" : " ▼") : "";
    const onclick = () => {
      order = {by: name, up: isOrder ? !order.up : true};
      draw();
      $("head").children[names.indexOf(name)].firstChild.focus();
    };
    const button = make("button", {onclick, title: HINTS[name] ?? ""}, title(name),
      make("span", {ariaHidden: "true", textContent: arrow}));
    const sort = isOrder ? (order.up ? "ascending" : "descending") : "none";
    return make("th", {scope: "col", ariaSort: sort}, button);
  });
  $("head").replaceChildren(...cells);
}

// Compare by the chosen column; rows without a value come last.
function compareBy(a, b) {
  const [x, y] = [a[order.by], b[order.by]];
  const hasNone = value => value === null || value === undefined;
  if (hasNone(x) || hasNone(y)) return hasNone(x) - hasNone(y);
  if (x === y) return 0;
  return (x < y ? -1 : 1) * (order.up ? 1 : -1);
}

// Rows that are equal in the chosen column are sorted by their position in the run.
const compareRows = (a, b) => compareBy(a, b) || a.run - b.run || a.id - b.id;

function tableRow(row, index, names) {
  const cells = names.map((name, place) => {
    if (name === "found") return foundCell(found.get(row));
    const isRun = name === "run" && row.key === undefined;
    const value = isRun ? runs[row.run].name : row[name];
    if (value === null || value === undefined) {
      return make("td", {textContent: name === "reward" ? "not finite" : ""});
    }
    const isNumber = typeof value === "number";
    const line = place ? undefined : lineOf.get(row.key);
    const colour = line === undefined ? "" : `swatch run${line}`;
    return make("td", {className: `${TEXT.has(name) ? "text" : ""} ${colour}`,
      textContent: isNumber ? short(value) : String(value), title: isNumber ? "" : String(value)});
  });
  return make("tr", {
    className: row.key === undefined && !isHeld(row) ? "dim" : "",
    tabIndex: index === 0 ? 0 : -1,
    onclick: event => choose(row, hasShift(event)),
    onkeydown: event => pressKey(event, row, index),
  }, ...cells);
}

// What was found, marked. A pattern may need more of the text than the cell holds.
function foundCell(snippet) {
  const match = readSearch($("search").value)[0]?.exec(snippet);
  const parts = !match ? [snippet] : [snippet.slice(0, match.index),
    make("mark", {textContent: match[0]}), snippet.slice(match.index + match[0].length)];
  return make("td", {className: "found"}, ...parts);
}

// Open a trajectory; of a group, list its trajectories.
function choose(row, beside) {
  if (row.key === undefined) {
    open(row, beside);
    return;
  }
  const name = groupBy;
  groupBy = "";
  $("search-line").querySelector("[aria-label='group by']").value = "";
  order = {by: "step", up: false};
  setFilter(name, row.key);
}

function markOpened() {
  for (const [index, element] of [...$("rows").children].entries()) {
    element.setAttribute("aria-selected", opened.includes(listed[index]));
  }
}

function pressKey(event, row, index) {
  const elements = $("rows").children;
  const targets = {ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: elements.length - 1};
  const target = targets[event.key];
  if (target !== undefined && elements[target]) {
    event.preventDefault();
    elements[index].tabIndex = -1;
    elements[target].tabIndex = 0;
    elements[target].focus();
  }
  if (event.key === "Enter" || event.key === "b") {
    event.preventDefault();
    event.stopPropagation();
    choose(row, event.key === "b");
  }
}
