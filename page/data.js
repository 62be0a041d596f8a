// ---- the runs and their trajectories ----

// A page holds one or more runs. In a file, a run has its table (compressed columns) and the tokens
// of some trajectories (compressed chunks). On a live page the server is asked instead.
const runs = data.runs;
nameRuns();
let rows = [];  // one object for each trajectory of each run: its columns, `run` and `id`

// Runs whose folders have the same name are told apart by the whole path.
function nameRuns() {
  const names = runs.map(run => run.name);
  for (const run of runs) {
    if (names.filter(name => name === run.name).length > 1) run.name = run.folder;
  }
}

async function decompress(base64) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Add rows to the table. `columns`: name -> values.
function addRows(run, columns) {
  const names = Object.keys(columns);
  const first = run.count ?? 0;
  const number = runs.indexOf(run);
  // Browsers read an object slowly if its many properties were added one by one.
  const blank = JSON.parse(JSON.stringify(Object.fromEntries(
    ["run", "id", "kl", ...names].map(name => [name, null]))));
  // The KL is known of a step, not of its trajectories.
  const kl = new Map(run.steps.map((step, place) => [step, run.metrics.kl?.[place] ?? null]));
  for (let i = 0; i < columns.step.length; i++) {
    const row = {...blank, run: number, id: first + i};
    for (const name of names) row[name] = columns[name][i];
    row.kl = kl.get(row.step) ?? null;
    items.add(row.item);
    rows.push(row);
  }
  run.count = first + columns.step.length;
}

// Whether the page can show the tokens of a trajectory.
const isHeld = row => data.live || row.held >= 0;

// The trajectory of a row: ids, mask, logprobs, entropies, rewards, advantage, scenes ...
async function load(row) {
  const run = runs[row.run];
  if (data.live) {
    const answer = await fetch(`/trajectory?run=${row.run}&id=${row.id}`);
    if (!answer.ok) throw Error(await answer.text());
    return answer.json();
  }
  const number = Math.floor(row.held / run.chunk);
  run.open ??= {};
  run.open[number] ??= decompress(run.chunks[number]);
  const trajectory = (await run.open[number])[row.held % run.chunk];
  trajectory.vocabulary ??= run.vocabulary;
  return trajectory;
}

// The text of each token. The bytes of a character may be spread over several tokens. The character
// is shown at the last of them, and the others are empty.
function texts(ids, vocabulary) {
  const utf8 = new TextDecoder();
  return ids.map(id => {
    // A string, or bytes if the token is a part of a character; the tokenizer may not have it.
    const piece = vocabulary[id] ?? `[unknown token ${id}]`;
    if (typeof piece === "string") return utf8.decode() + piece;
    return utf8.decode(new Uint8Array(piece), {stream: true});
  });
}

// Cut a trajectory where sampled tokens (a reply) and others (the environment's) meet, and where a
// segment begins. -> [{sampled, start, end, turn, segment, known}]; the environment's part before
// turn k has turn k, too. segment: the number of the segment that begins here, 2 or more; known: the
// end of what the model had been shown in the segment before.
function segmentsOf(trajectory) {
  const {ids, mask, starts} = trajectory;
  const found = [];
  let start = 0;
  let turn = 1;
  while (start < ids.length) {
    const sampled = Boolean(mask[start]);
    let end = start + 1;
    while (end < ids.length && Boolean(mask[end]) === sampled && !starts.includes(end)) end++;
    const place = starts.indexOf(start);
    const part = {sampled, start, end, turn};
    if (place > 0) {
      part.segment = place + 1;
      part.known = knownUntil(trajectory, starts[place - 1], found.at(-1), part);
    }
    found.push(part);
    if (sampled) turn += 1;
    start = end;
  }
  return found;
}

// What is new in the prompt of a segment stands after the last reply or, if the prompt does not show
// it, after the lines that both segments begin with. What stands before a reply tells it from an
// equal text in a list of actions.
function knownUntil({ids, pieces}, before, reply, {start, end}) {
  const said = ids.slice(reply.start, reply.end - 1);  // without the token that ended it
  for (let at = end - said.length; said.length && at > start; at--) {
    const isReply = ids[at - 1] === ids[reply.start - 1]
      && said.every((id, k) => ids[at + k] === id);
    if (isReply) return at + said.length;
  }
  let same = 0;
  while (start + same < end && ids[before + same] === ids[start + same]) same++;
  while (same && pieces && !pieces[start + same - 1].includes("\n")) same--;
  return start + same;
}

// ---- search ----

// The terms of a search, with "&" between them: texts, or regular expressions between slashes. Upper
// and lower case are alike. Throws SyntaxError for a regular expression that cannot be read.
function readSearch(text) {
  const terms = text.match(/\s*\/(?:\\.|[^\/\\])+\/\s*(?=&|$)|[^&]+/g) ?? [];
  return terms.map(term => term.trim()).filter(term => term).map(term =>
    RegExp(/^\/.+\/$/.test(term) ? term.slice(1, -1)
      : term.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&"), "i"));
}

// Find the trajectories in which all terms of `text` stand. where: "anything", "replies",
// "environment". -> Map: row -> the text around the first term.
async function search(text, where, progress) {
  const found = new Map();
  const terms = readSearch(text);
  if (data.live) {
    const answer = await fetch(`/search?${new URLSearchParams({text, where})}`);
    if (!answer.ok) throw Error(await answer.text());
    const byKey = new Map(rows.map(row => [`${row.run} ${row.id}`, row]));
    for (const [run, id, snippet] of await answer.json()) {
      found.set(byKey.get(`${run} ${id}`), snippet);
    }
    return found;
  }
  const held = rows.filter(isHeld);
  for (const [count, row] of held.entries()) {
    if (count % 200 === 0) progress(count / held.length);
    const trajectory = await load(row);
    trajectory.pieces ??= texts(trajectory.ids, trajectory.vocabulary);
    const matches = terms.map(() => null);
    for (const {sampled, start, end} of segmentsOf(trajectory)) {
      if (where !== "anything" && sampled !== (where === "replies")) continue;
      const written = trajectory.pieces.slice(start, end).join("");
      for (const [k, term] of terms.entries()) matches[k] ??= term.exec(written);
      if (matches.every(match => match)) break;
    }
    if (terms.length && matches.every(match => match)) {
      const [{0: match, index, input}] = matches;
      found.set(row, input.slice(Math.max(0, index - 30), index + match.length + 50));
    }
  }
  return found;
}
