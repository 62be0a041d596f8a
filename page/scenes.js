// ---- what a world draws ----

// A scene is {room}, a BabyAI room from above, or {inventory, tree}, TextCraft's.
function sceneElements(scene) {
  if (scene.room) return [room(scene.room)];
  const held = Object.entries(scene.inventory).map(([name, count]) => `${count} ${name}`);
  const parts = [make("div", {textContent: `inventory: ${held.join(", ") || "empty"}`})];
  if (scene.tree) {
    parts.push(make("div", {textContent: "one way to the goal:"}),
      make("ul", {}, branch(scene.tree, scene.inventory)));
  }
  return [make("div", {className: "state"}, ...parts)];
}

// A node of the crafting tree: [name, amount, nodes of its ingredients].
function branch([name, amount, needs], inventory) {
  const isHeld = (inventory[name] ?? 0) >= amount;
  const below = needs.map(need => branch(need, inventory));
  return make("li", {}, make("span", {className: isHeld ? "held" : "",
    textContent: `${amount} ${name}${needs.length ? "" : " (get)"}`}),
    ...(below.length ? [make("ul", {}, ...below)] : []));
}

// The text of a web page; the line of the element that the reply acts on is marked.
function withElement(env, text, reply) {
  const targets = [...reply.matchAll(/(?:click|type|hover)\s*\[(\d+)\]/g)];
  const target = env === "webarena" && targets.at(-1);  // a thought may name others before it
  if (!target) return [text];
  const line = RegExp(`^[ \\t]*\\[${target[1]}\\].*$`, "m").exec(text);
  if (!line) return [text];
  return [text.slice(0, line.index), make("mark", {textContent: line[0]}),
    text.slice(line.index + line[0].length)];
}

// ---- BabyAI's room from above ----

const COLOURS = ["#d62728", "#2a9d3a", "#1f6fd0", "#8e44ad", "#d4a900", "#808890"];
const CELL = 16;  // pixels

// `cells` has two characters per cell, row by row: the kind of object, and its colour.
function room([width, cells, [agentX, agentY, direction]]) {
  const height = cells.length / 2 / width;
  const picture = svg("svg", {
    class: "room",
    width: width * CELL,
    height: height * CELL,
    viewBox: `0 0 ${width * CELL} ${height * CELL}`,
    role: "img",
    "aria-label": "the room from above",
  });
  for (let i = 0; i < width * height; i++) {
    const kind = cells[2 * i];
    const colour = COLOURS[cells[2 * i + 1]] ?? "#808890";
    picture.append(...shapes(kind, colour, i % width * CELL, Math.floor(i / width) * CELL));
  }
  const centre = `${agentX * CELL + CELL / 2} ${agentY * CELL + CELL / 2}`;
  const transform = `translate(${centre}) rotate(${90 * direction})`;
  picture.append(svg("path", {d: "M5 0L-4 4.5L-4 -4.5Z", fill: "#111", transform}));
  return picture;
}

// The shapes that draw an object in the cell whose upper left corner is (x, y).
function shapes(kind, colour, x, y) {
  const cx = x + CELL / 2;
  const cy = y + CELL / 2;
  if (kind === "#") {  // wall
    return [svg("rect", {x, y, width: CELL, height: CELL, fill: "#5b636c"})];
  }
  if (kind === "o") return [svg("circle", {cx, cy, r: 5, fill: colour})];  // ball
  if (kind === "b") {  // box
    return [svg("rect", {x: x + 3, y: y + 3, width: 10, height: 10, fill: "none", stroke: colour,
                         "stroke-width": 3})];
  }
  if (kind === "k") {  // key
    const d = `M${x + 4} ${y + 5}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0M${x + 7} ${y + 8}v6m0 -3h4`;
    return [svg("path", {d, fill: "none", stroke: colour, "stroke-width": 2})];
  }
  if (!"dcl".includes(kind)) return [];
  // A door: "d" is open, "c" is closed, "l" is locked.
  const door = svg("rect", {
    x: x + 1, y: y + 1, width: CELL - 2, height: CELL - 2,
    fill: kind === "d" ? "none" : colour, stroke: colour, "stroke-width": 2,
  });
  if (kind !== "l") return [door];
  return [door, svg("circle", {cx, cy, r: 3, fill: "#fff"})];
}
