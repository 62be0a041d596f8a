// ---- one or two trajectories ----

// A link to a trajectory: #step/item/sample, with the run's number before it if there are several,
// and with the group behind it if an item was named twice in a step. Two are joined by "&".
function addressOf(row) {
  const same = other => other.run === row.run && other.step === row.step && other.item === row.item
    && other.sample === row.sample;
  const parts = [row.step, row.item, row.sample];
  if (rows.filter(same).length > 1) parts.push(row.group);
  const run = runs.length > 1 ? `${row.run}:` : "";
  return run + parts.map(encodeURIComponent).join("/");
}

function rowAt(address) {
  const [, run, rest] = address.match(/^(?:(\d+):)?(.*)$/);
  let parts;
  try {
    parts = rest.split("/").map(decodeURIComponent);
  } catch {  // not an address of this page
    return undefined;
  }
  const [step, item, sample, group] = parts;
  return rows.find(row => row.run === Number(run ?? 0) && String(row.step) === step
    && row.item === item && String(row.sample) === sample
    && (group === undefined || String(row.group) === group));
}

// Open a trajectory alone, or beside the one that was opened last. The address of the page says
// what is open, so that back, forward and links work.
function open(row, beside) {
  const wanted = beside ? [...opened.slice(-1), row] : [row];
  location.hash = wanted.map(addressOf).join("&");
}

function close() {
  location.hash = "";
}

// Show what the address says.
async function followAddress() {
  const parts = location.hash.slice(1).split("&").filter(part => part);
  const before = opened.length;
  opened = parts.map(rowAt).filter(row => row).slice(0, 2);
  $("side").hidden = !opened.length;
  $("explorer").classList.toggle("opened", opened.length > 0);
  $("explorer").classList.toggle("two", opened.length > 1);
  markOpened();
  await render();
  const isNarrow = matchMedia("(max-width: 999px)").matches;
  if (opened.length && isNarrow) $("side").scrollIntoView();
  else if (opened.length && !before) $("explorer").scrollIntoView();
}

let colouring = "mask";
let marksDifferences = true;
let folds = true;  // whether instructions and what was shown before are folded

function makeTools() {
  const colour = menu("colour of tokens", [["mask", "colour: sampled or not"],
    ["logprob", "colour: improbable tokens"], ["entropy", "colour: entropy"],
    ["advantage", "colour: advantage"]], value => { colouring = value; render() });
  colour.id = "colour";
  const differences = make("label", {id: "differences", hidden: true, title: "what the other "
    + "trajectory has not, is underlined; turns that are equal in both are pale"},
    make("input", {type: "checkbox", checked: true, style: "width: auto",
      onchange: event => { marksDifferences = event.target.checked; render() }}),
    " mark differences ");
  const folding = make("label", {title: "instructions, and what the observation before said (o)"},
    make("input", {type: "checkbox", checked: true, id: "folds", style: "width: auto",
      onchange: event => { folds = event.target.checked; render() }}), " fold what is known ");
  const button = (textContent, titleText, onclick) =>
    make("button", {textContent, title: titleText, onclick});
  $("tools").replaceChildren(
    button("‹", "previous in the table (k)", () => neighbour(-1)),
    button("›", "next in the table (j)", () => neighbour(1)),
    button("×", "close (Escape)", close),
    colour, folding, differences, make("button", {id: "first-difference", hidden: true,
      textContent: "first difference", onclick: showFirstDifference}));
}

// Open the trajectory that stands before or after the opened one in the table.
function neighbour(by) {
  const place = listed.indexOf(opened[0]);
  const row = listed[place + by];
  if (row && row.key === undefined) open(row, false);
}

// Loading takes time. If `render` is called again meanwhile, only the last call shows its articles.
let lastCall = 0;
async function render() {
  lastCall += 1;
  const call = lastCall;
  const wanted = [...opened];
  let articles;
  try {
    const loaded = await Promise.all(wanted.map(row => isHeld(row) ? load(row) : null));
    for (const trajectory of loaded.filter(trajectory => trajectory)) {
      trajectory.pieces ??= texts(trajectory.ids, trajectory.vocabulary);
      // Demonstrations have no log-probs: they are all 0.
      trajectory.was_sampled = trajectory.logprobs.some(logprob => logprob !== 0);
    }
    const isPair = loaded.length === 2 && loaded.every(trajectory => trajectory);
    const marks = isPair && marksDifferences ? differences(...loaded) : [null, null];
    articles = wanted.map((row, k) => loaded[k] ? article(loaded[k], row, marks[k]) : absent(row));
    if (call === lastCall) {
      $("differences").hidden = !isPair;
      $("first-difference").hidden = !(isPair && marksDifferences);
    }
  } catch (error) {
    articles = [make("p", {className: "bad", textContent: `cannot be shown: ${error.message}`})];
  }
  if (call === lastCall) $("pair").replaceChildren(...articles);
}

function absent(row) {
  const run = runs[row.run];
  return make("article", {}, ...heading({score: null, error: ""}, row),
    make("p", {textContent: `Its tokens are not in this file, which has those of `
      + `${rows.filter(isHeld).length} trajectories. All are shown by: `
      + `python view.py --live ${run.folder}`}),
    make("p", {textContent: `More are written by: python view.py ${run.folder} --most N`}));
}

// What stands above the turns: the title, the outcome, and buttons that open the group's others.
function heading(trajectory, row) {
  const group = rows.filter(other => other.run === row.run && other.step === row.step
    && other.group === row.group && other !== row);
  const buttons = group.map(other => make("button", {
    textContent: `${other.sample}: ${short(other.reward)}`,
    title: "open beside",
    onclick: () => { location.hash = [row, other].map(addressOf).join("&") },
  }));
  const error = trajectory.error ? ", " + trajectory.error : "";
  const score = trajectory.score === null ? "" : `, score ${short(trajectory.score)}`;
  const outcome = `${row.status}, ${row.turns} turns, reward ${short(row.reward)}${score}${error}`;
  const name = runs.length > 1 ? `${runs[row.run].name}, ` : "";
  const link = make("a", {href: `#${addressOf(row)}`, textContent: "link",
    title: "the address of this trajectory"});
  return [
    make("h3", {}, `${name}${row.item}, step ${row.step}, sample ${row.sample} `),
    make("div", {}, row.goal ? `goal: ${row.goal}` : ""),
    make("div", {className: "dim"}, row.category ? `${row.category}: ` : "", outcome, " · ", link),
    make("div", {className: "group"}, buttons.length ? "its group (sample: reward): " : "",
      ...buttons),
  ];
}

function article(trajectory, row, marks) {
  const element = make("article", {}, ...heading(trajectory, row));
  if (!trajectory.has_all_turns) {
    element.append(make("div", {className: "dim", textContent: "Some replies are not learnt and "
      + "stand in the environment's text: turns count the learnt ones."}));
  }
  const segments = segmentsOf(trajectory);
  let before = "";  // the text of the environment before the last reply
  for (const [place, segment] of segments.entries()) {
    const next = segments[place + 1];
    const differing = marks?.[place]?.some(differs => differs) ? marks[place] : null;
    const box = segment.sampled
      ? reply(trajectory, row, segment, differing)
      : environment(trajectory, row, segment, next, differing, before);
    if (!segment.sampled) {
      before = trajectory.pieces.slice(segment.known ?? segment.start, segment.end).join("");
    }
    if (marks?.[place] && !differing) box.classList.add("same");
    element.append(box);
  }
  // An episode's last observation has no tokens, as no reply follows it.
  const last = segments.at(-1);
  const scene = last?.sampled && trajectory.scenes?.[last.turn];
  if (scene) {
    element.append(make("div", {className: "turn user"},
      make("div", {className: "who", textContent: "environment, at the end"}),
      ...sceneElements(scene)));
  }
  return element;
}

const folded = (textContent, text) => make("details", {}, make("summary", {textContent}), ...text);

// What `text` says that `before` does not: the sentences, lines and parts of lists that are new,
// with "…" for others. null: nothing can be saved by showing them alone.
function newIn(text, before) {
  const cut = written => written.split(/(?<=[.!?,:\]]\s)|(?<=\n)/);
  const known = new Set(cut(before).map(part => part.trim()));
  let added = "";
  for (const part of cut(text)) {
    if (!known.has(part.trim())) added += part;
    else if (!added.endsWith("… ")) added += "… ";
  }
  return added.length < .7 * text.length ? added : null;
}

// The text of the environment before a reply: first what is new, then what is known already.
function environment(trajectory, row, {start, end, turn, segment, known}, next, marks, before) {
  const box = make("div", {className: "turn user"},
    make("div", {className: "who", textContent: "environment"}));
  if (segment) {
    box.classList.add("segment");
    box.append(folded(`segment ${segment} begins: ${known - start} tokens that the model was shown `
      + "before", [trajectory.pieces.slice(start, known).join("")]));
  }
  let written = trajectory.pieces.slice(known ?? start, end).join("");
  const instructions = folds && !before && !marks ? written.indexOf(trajectory.first) : -1;
  if (instructions > 0) {
    box.append(folded("instructions", [written.slice(0, instructions)]));
    written = written.slice(instructions);
  }
  if (marks) {
    for (const [k, word] of words(written).entries()) {
      box.append(marks[k] ? make("span", {className: "differs", textContent: word}) : word);
    }
  } else {
    const reply = next ? trajectory.pieces.slice(next.start, next.end).join("") : "";
    const added = folds && before ? newIn(written, before) : null;
    const whole = withElement(row.env, written, reply);
    const isLost = whole.length > 1 && withElement(row.env, added ?? "", reply).length === 1;
    if (added === null || isLost) box.append(...whole);
    else {
      box.append(...withElement(row.env, added, reply),
        folded("the whole observation", whole));
    }
  }
  const scene = trajectory.scenes?.[turn - 1];
  if (scene) box.append(...sceneElements(scene));
  return box;
}

// What the policy wrote in a turn, with the turn's reward and the mean advantage of its tokens.
function reply(trajectory, row, {start, end, turn}, marks) {
  const sum = (values, from, to) => values.slice(from, to).reduce((a, b) => a + b, 0);
  const reward = sum(trajectory.rewards, start, end);
  // Where replies are chosen among texts, a token of log-prob 0 was the only one possible.
  const isChoice = trajectory.choices?.[start]?.length > 0;
  const own = trajectory.advantage.slice(start, end)
    .filter((_, i) => !isChoice || trajectory.logprobs[start + i] !== 0);
  const advantage = own.includes(null) || !own.length ? null : sum(own, 0) / own.length;
  const label = make("div", {className: "who"}, `turn ${turn}: reply, reward ${short(reward)}, `
    + `advantage ${signed(advantage)}`);
  const isInvalid = trajectory.invalid_turns.includes(turn);
  const badge = (textContent, titleText) =>
    label.append(make("span", {className: "badge", textContent, title: titleText}));
  if (isInvalid) badge("invalid", "the world refused this action");
  if (isInvalid && reward < 0 && runs[row.run].invalid_penalty > 0) {
    badge("penalised", "--invalid_penalty was taken off its reward");
  }
  if (trajectory.cut_turns.includes(turn)) badge("cut", "the reply reached --max_tokens");
  const box = make("div", {className: `turn assistant${isInvalid ? " invalid" : ""}`}, label);
  const allowed = trajectory.choices?.[start];
  if (allowed?.length) box.append(choiceOf(trajectory, allowed, start, end));
  const strongest = Math.max(1e-9, ...trajectory.advantage.map(Math.abs));
  for (let at = start; at < end; at++) {
    const span = token(trajectory, at, strongest);
    if (marks?.[at - start]) span.classList.add("differs");
    box.append(span);
  }
  return box;
}

// What a reply was chosen among, and how probable it was.
function choiceOf(trajectory, allowed, start, end) {
  const logprob = trajectory.logprobs.slice(start, end).reduce((a, b) => a + b, 0);
  const written = trajectory.ids.slice(start, end).join();
  const lines = allowed.map(ids => {
    const isOpen = ids.at(-1) === null;
    const text = texts(isOpen ? ids.slice(0, -1) : ids, trajectory.vocabulary).join("");
    const isChosen = isOpen ? `${written},`.startsWith(`${ids.slice(0, -1).join()},`)
      : written === ids.join();
    return make("li", {className: isChosen ? "held" : "", textContent: text + (isOpen ? " ..." : "")});
  });
  return make("details", {}, make("summary", {textContent: `chosen among ${allowed.length}, with `
    + `probability ${short(Math.exp(logprob))}`}), make("ul", {}, ...lines));
}

// A sampled token, with its colour. Pointing at it shows its numbers.
function token(trajectory, at, strongest) {
  const span = make("span", {className: "t m", textContent: trajectory.pieces[at]});
  const logprob = trajectory.logprobs[at];
  const entropy = trajectory.entropies?.[at];
  const advantage = trajectory.advantage[at];
  const probability = Math.exp(logprob);
  const digits = x => x === null ? "not finite" : x.toFixed(3);
  const parts = [`token ${trajectory.ids[at]}`];
  if (trajectory.was_sampled) {
    parts.push(`probability ${logprob === null ? "not finite" : digits(probability)}`,
      `log-prob ${digits(logprob)}`);
  }
  if (entropy !== undefined) parts.push(`entropy ${digits(entropy)} nats`);
  parts.push(`advantage ${digits(advantage)}`);
  span.title = parts.join(", ");
  const strengths = {
    mask: 0,
    logprob: 1 - probability,
    entropy: Math.min(1, (entropy ?? 0) / 3),
    advantage: Math.abs(advantage) / strongest,
  };
  const colour = colouring === "advantage" && advantage > 0 ? "#2a9d5c" : "#d9534f";
  if (colouring === "mask") return span;
  const percent = Math.round(60 * strengths[colouring]);
  const background = `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
  span.style = `color: var(--fg); background: ${background}`;
  return span;
}

// ---- what differs between two trajectories ----

const words = text => text.match(/\s+|[\w']+|[^\s\w]/g) ?? [];

// For each segment of both trajectories, which of its parts the same segment of the other has not:
// tokens of a reply, words of the environment. A segment that only one of them has gets no marks.
// -> [marks of a, marks of b]
function differences(a, b) {
  const [ofA, ofB] = [segmentsOf(a), segmentsOf(b)];
  const parts = (trajectory, {sampled, start, end, known}) => {
    const pieces = trajectory.pieces.slice(known ?? start, end);
    return sampled ? pieces : words(pieces.join(""));
  };
  const marks = [[], []];
  for (let k = 0; k < Math.min(ofA.length, ofB.length); k++) {
    const [first, second] = missing(parts(a, ofA[k]), parts(b, ofB[k]));
    marks[0].push(first);
    marks[1].push(second);
  }
  return marks;
}

// Which elements of `a` and of `b` are not in their longest common subsequence.
function missing(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start
         && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const [n, m] = [a.length - start - end, b.length - start - end];
  const inBoth = [a.map((_, i) => i < start || i >= a.length - end),
                  b.map((_, i) => i < start || i >= b.length - end)];
  if (n * m <= 4e6) {
    const length = Array.from({length: n + 1}, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i--) {
      for (let j = m - 1; j >= 0; j--) {
        length[i][j] = a[start + i] === b[start + j] ? length[i + 1][j + 1] + 1
          : Math.max(length[i + 1][j], length[i][j + 1]);
      }
    }
    for (let i = 0, j = 0; i < n && j < m;) {
      if (a[start + i] === b[start + j]) {
        inBoth[0][start + i++] = inBoth[1][start + j++] = true;
      } else if (length[i + 1][j] >= length[i][j + 1]) i++;
      else j++;
    }
  }
  return inBoth.map(flags => flags.map(flag => !flag));
}

// Scroll both trajectories to the first turn in which they differ.
function showFirstDifference() {
  if ($("first-difference").hidden) return;
  const boxes = [...document.querySelectorAll("article .turn")];
  for (const box of boxes) box.classList.remove("here");
  const ofEach = [...document.querySelectorAll("article")].map(element =>
    [...element.querySelectorAll(".turn")]);
  const place = ofEach[0].findIndex(box => !box.classList.contains("same"));
  const first = ofEach.map(list => list[place]).filter(box => box);
  for (const box of first) box.classList.add("here");
  first[0]?.scrollIntoView({block: "center"});
}
