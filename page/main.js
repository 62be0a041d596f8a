// ---- the page as a whole ----

const KEYS = [
  ["?", "this help"],
  ["/", "go to the search"],
  ["↑ ↓ Home End", "move in the table"],
  ["Enter", "open a trajectory, or list a group's"],
  ["b, or a click with Shift", "open beside the last one"],
  ["j k", "next, previous trajectory of the table"],
  ["c", "next colour of the tokens"],
  ["d", "mark differences of two trajectories, or not"],
  ["f", "go to the first difference"],
  ["o", "fold instructions and repeated observations, or not"],
  ["Escape", "close"],
  ["Alt ← →", "back, forward (the browser's own keys)"],
];

function makeHelp() {
  const lines = KEYS.map(([key, what]) =>
    make("tr", {}, make("td", {}, make("b", {textContent: key})), make("td", {textContent: what})));
  $("help").replaceChildren(make("h3", {textContent: "Keys"}),
    make("table", {}, make("tbody", {}, ...lines)),
    make("p", {textContent: "Green: sampled by the policy, and trained on. A red border: the world "
      + "refused the action. Point at a token for its probability, entropy and advantage."}),
    make("button", {textContent: "close", onclick: () => $("help").close()}));
}

function onKey(event) {
  const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape" && !$("help").open) {
    if (typing) event.target.blur();
    else if (opened.length) close();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const colour = $("colour");
  const actions = {
    "?": () => $("help").open ? $("help").close() : $("help").showModal(),
    "/": () => $("search").focus(),
    j: () => neighbour(1),
    k: () => neighbour(-1),
    c: () => {
      colour.selectedIndex = (colour.selectedIndex + 1) % colour.options.length;
      colour.dispatchEvent(new Event("change"));
    },
    d: () => $("differences").querySelector("input").click(),
    f: showFirstDifference,
    o: () => $("folds").click(),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
}

// The names of the runs, what they are, and what had to be left out.
function drawHeader() {
  document.title = runs.map(run => run.name).join(", ");
  $("name").textContent = document.title;
  $("about").replaceChildren(...runs.map((run, number) => make("div", {className: "dim"},
    runs.length > 1
      ? make("span", {className: `swatch run${number % 4}`, textContent: `${run.name}: `}) : "",
    run.about, run.note)));
  const left = runs.flatMap(run => run.left_out);
  $("left_out").textContent = left.length ? `left out: ${left.join("; ")}` : "";
}

// On a live page: poll for new data.
const SECONDS = 2;
async function follow() {
  try {
    const counts = runs.map(run => run.count).join(",");
    const address = `/update?generation=${data.generation}&rows=${counts}`;
    const answer = await (await fetch(address)).json();
    if (answer.generation !== data.generation) {
      location.reload();  // steps have been played again
      return;
    }
    let isNew = false;
    for (const [number, news] of answer.runs.entries()) {
      const {table, ...rest} = news;
      isNew ||= table.step.length > 0;
      Object.assign(runs[number], rest);
      addRows(runs[number], table);
    }
    nameRuns();
    if (isNew) {
      drawHeader();
      drawCurves();
      makeFilters();
      const place = [...$("rows").children].indexOf(document.activeElement);
      const focused = listed[place];
      draw();
      $("rows").children[listed.indexOf(focused)]?.focus();
    }
    const steps = runs.map(run => `${run.steps.length} of ${run.total_steps} steps`).join(", ");
    $("live").textContent = `live: ${steps}`;
    $("live").className = "";
  } catch {
    $("live").textContent = "live: the server does not answer; is view.py --live still running?";
    $("live").className = "bad";
  }
  setTimeout(follow, 1000 * SECONDS);
}

async function begin() {
  for (const run of runs) {
    addRows(run, typeof run.table === "string" ? await decompress(run.table) : run.table);
  }
  drawHeader();
  drawCurves();
  makeFilters();
  makeSmoothing();
  makeTools();
  makeHelp();
  draw();
  $("distributions").ontoggle = drawCharts;
  $("help-button").onclick = () => $("help").showModal();
  document.addEventListener("keydown", onKey);
  $("pair").addEventListener("pointerover", event => {
    if (event.target.matches(".t.m")) $("readout").textContent = event.target.title;
  });
  window.addEventListener("hashchange", followAddress);
  await followAddress();
  if (data.live) follow();
}

begin();
