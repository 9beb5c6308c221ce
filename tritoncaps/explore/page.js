// The state of the page, and the handlers of mouse and keys.

// ---------------------------------------------------------------- state

const state = {
  image: 0,
  iteration: 0, // 0 is the start
  epsilon: 0, // its index in header.epsilons
  parent: null, // the chosen capsule: layer, type, place
  follow: true, // choose the class that the network predicts
  hover: null, // the capsule under the mouse: layer, flat
  x: isVector ? 0 : 3, // entries of the pose in the plot of the votes
  y: isVector ? 1 : 7,
  moved: [], // added to the entries of the capsule that the decoder gets
};
let chosen = null; // computed for the parent and the image: edges, votes, assignments of every iteration

const iterations = () => layers[state.parent && state.parent.layer ? state.parent.layer : last].iterations;

function set(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  if ("image" in changes && !("parent" in changes) && state.parent && state.parent.layer === last && state.follow)
    state.parent = { layer: last, type: best(state.image), place: 0 };
  state.iteration = Math.min(Math.max(state.iteration, 0), iterations());
  if (before.image !== state.image || before.parent !== state.parent) choose();
  draw();
  if (before.iteration !== state.iteration && before.parent === state.parent) animate(before.iteration);
  else settle();
}

function choose() {
  state.moved = new Array(layers[last].entries).fill(0);
  const { parent } = state;
  chosen = null;
  if (!parent || !parent.layer) return;
  const edges = edgesOf(parent), below = layers[parent.layer - 1];
  const steps = [];
  for (let t = 0; t <= layers[parent.layer].iterations; t++) steps.push(assignmentsOf(parent, edges, t));
  const activations = part(`${below.name}.activations`, 0, state.image);
  const largest = steps.map((step) => step.reduce((a, b) => Math.max(a, b), 0));
  chosen = {
    edges,
    votes: votesOf(parent, edges),
    steps,
    activations: Float32Array.from(edges, ({ child }) => activations[child]),
    largest: Math.max(...largest, 1e-6),
    edgeOf: new Map(edges.map(({ child }, i) => [child, i])),
  };
}

const scores = (image, epsilon = 0) => Array.from(part("scores", epsilon, image));
const best = (image, epsilon = 0) => scores(image, epsilon).reduce((k, a, i, all) => (a > all[k] ? i : k), 0);
const labelsOf = (image) => header.labels[image].map((k) => header.classes[k]).join(" and ");

// ---------------------------------------------------------------- the page

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function draw() {
  layers.slice(0, last).forEach((_, index) => drawLayer(index));
  drawPicture();
  drawClasses();
  drawAttack();
  drawSteps();
  drawPose();
  drawReconstruction();
  document.querySelectorAll("#images button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === state.image)));
}

function build() {
  $("title").textContent = header.title;
  $("about").textContent = `${header.about}; ${header.parameters.toLocaleString("en")} parameters`;
  $("images").replaceChildren(...header.labels.map((_, n) => {
    const button = element("button", "", { type: "button", "aria-label": `Image ${n + 1}: ${labelsOf(n)}` });
    const [height, width] = header.size;
    button.append(bitmap(part("pictures", 0, n), height, width, header.channels), element("span", labelsOf(n)));
    button.addEventListener("click", () => set({ image: n }));
    return button;
  }));
  $("layers").replaceChildren(...layers.slice(0, last).map((layer, index) => buildLayer(layer, index)));
  $("classes").replaceChildren(...header.classes.map(buildClass));
  $("classes").classList.toggle("many", header.classes.length > 6);
  const entry = (h) => (isVector ? `entry ${h + 1}` : `row ${Math.floor(h / 4) + 1}, column ${(h % 4) + 1}`);
  for (const [id, key] of [["entry-x", "x"], ["entry-y", "y"]]) {
    $(id).replaceChildren(...Array.from({ length: layers[last].entries }, (_, h) => element("option", entry(h), { value: h })));
    $(id).value = state[key];
    $(id).addEventListener("change", () => set({ [key]: Number($(id).value) }));
  }
  $("epsilon").max = header.epsilons.length - 1;
  $("epsilon").addEventListener("input", () => set({ epsilon: Number($("epsilon").value) }));
  $("iteration").addEventListener("input", () => set({ iteration: Number($("iteration").value) }));
  $("play").addEventListener("click", play);
  $("theme-button").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("scatter").addEventListener("mousemove", hoverScatter);
  $("scatter").addEventListener("mouseleave", () => hover(null));
  if (drawsAgain) buildDecoder();
}

function buildLayer(layer, index) {
  const figure = element("figure", "", { class: "layer" }), caption = element("figcaption");
  const size = `${layer.types} types, ${layer.height} × ${layer.width}`;
  caption.append(element("b", `${title(layer)}`), element("span", size), element("span", "", { id: `note-${layer.name}` }));
  const canvas = element("canvas", "", { id: `layer-${layer.name}`, tabindex: 0, role: "img", "aria-label": `${title(layer)}, ${size}` });
  const at = (event) => capsuleAt(layer, event.offsetX, event.offsetY);
  canvas.addEventListener("click", (event) => {
    const flat = at(event);
    if (flat !== null) select(index, flat);
  });
  canvas.addEventListener("mousemove", (event) => {
    const flat = at(event);
    hover(flat === null ? null : { layer: index, flat }, event);
  });
  canvas.addEventListener("mouseleave", () => hover(null));
  canvas.addEventListener("keydown", (event) => moveIn(index, event));
  figure.append(caption, canvas);
  return figure;
}

function buildClass(name, k) {
  const button = element("button", "", { type: "button", id: `class-${k}` }), bar = element("span", "", { class: "bar" });
  bar.append(element("i"));
  button.append(element("canvas"), element("span", name, { class: "name" }), element("span", "", { class: "value" }), bar);
  button.addEventListener("click", () => select(last, k));
  return button;
}

function buildDecoder() {
  $("drawing").hidden = false;
  $("dimensions").replaceChildren(...Array.from({ length: layers[last].entries }, (_, d) => {
    const label = element("label", "", { class: "slider" }), text = element("span");
    const input = element("input", "", { id: `dimension-${d}`, type: "range", min: -0.25, max: 0.25, step: 0.05 });
    text.append(element("span", `entry ${d + 1}`), element("output"));
    label.append(text, input);
    input.addEventListener("input", () => {
      state.moved[d] = Number(input.value);
      drawReconstruction();
    });
    return label;
  }));
  $("reset").addEventListener("click", () => {
    state.moved.fill(0);
    drawReconstruction();
  });
}

function select(layer, flat) {
  const { places } = layers[layer], type = Math.floor(flat / places), place = flat % places;
  state.follow = false;
  set({ parent: { layer, type, place }, iteration: layers[layer].iterations || 0 });
}

/** The capsule at a point of a layer's canvas, or null. */
function capsuleAt(layer, x, y) {
  const wide = layer.width * layer.cell + GAP, high = layer.height * layer.cell + GAP;
  const column = Math.floor((x - GAP) / wide), row = Math.floor((y - GAP) / high), type = row * layer.columns + column;
  const i = Math.floor((y - GAP - row * high) / layer.cell), j = Math.floor((x - GAP - column * wide) / layer.cell);
  const inside = column >= 0 && column < layer.columns && row >= 0 && type < layer.types && i < layer.height && j < layer.width;
  return inside ? type * layer.places + i * layer.width + j : null;
}

function moveIn(index, event) {
  const layer = layers[index], { parent } = state;
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!steps) return;
  event.preventDefault();
  event.stopPropagation();
  if (!parent || parent.layer !== index) return select(index, 0);
  const row = Math.floor(parent.place / layer.width) + steps[0], column = (parent.place % layer.width) + steps[1];
  const inside = row >= 0 && row < layer.height && column >= 0 && column < layer.width;
  const turn = steps[0] ? steps[0] * layer.columns : steps[1]; // to the next tile
  const type = inside ? parent.type : parent.type + turn;
  if (type < 0 || type >= layer.types) return;
  const wrap = (n, size) => (n + size) % size;
  select(index, type * layer.places + wrap(row, layer.height) * layer.width + wrap(column, layer.width));
}

function hover(what, event) {
  const before = state.hover;
  state.hover = what;
  const same = before && what && before.layer === what.layer && before.flat === what.flat;
  if (!same) {
    for (const index of new Set([before, what].filter((x) => x && x.layer < last).map((x) => x.layer))) drawLayer(index);
    drawScatter();
  }
  const tip = $("tip");
  tip.hidden = !what;
  if (!what) return;
  const layer = layers[what.layer];
  const parts = [nameOf({ layer: what.layer, type: Math.floor(what.flat / layer.places), place: what.flat % layer.places })];
  parts.push(`activation ${number(part(`${layer.name}.activations`, state.epsilon, state.image)[what.flat])}`);
  if (chosen && !state.epsilon && what.layer === state.parent.layer - 1 && chosen.edgeOf.has(what.flat))
    parts.push(`assignment ${number(chosen.steps[state.iteration][chosen.edgeOf.get(what.flat)], 3)}`);
  tip.textContent = parts.join(" · ");
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function hoverScatter(event) {
  let nearest = -1, least = 14;
  scatterPoints.forEach(([x, y], i) => {
    const distance = Math.hypot(x - event.offsetX, y - event.offsetY);
    if (distance < least) [nearest, least] = [i, distance];
  });
  hover(nearest < 0 ? null : { layer: state.parent.layer - 1, flat: chosen.edges[nearest].child }, event);
}

let playing = 0;

function play() {
  if (!chosen) return;
  clearInterval(playing);
  set({ iteration: 0 });
  playing = setInterval(() => {
    if (state.iteration >= iterations()) clearInterval(playing);
    else set({ iteration: state.iteration + 1 });
  }, 1100);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme-button").textContent = theme === "dark" ? "Light" : "Dark";
  if (buffer) {
    draw();
    settle();
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName), count = header.labels.length;
  const actions = {
    "[": () => set({ iteration: state.iteration - 1 }),
    "]": () => set({ iteration: state.iteration + 1 }),
    ",": () => set({ epsilon: Math.max(state.epsilon - 1, 0) }),
    ".": () => set({ epsilon: Math.min(state.epsilon + 1, header.epsilons.length - 1) }),
    Escape: () => set({ parent: null }),
    t: () => $("theme-button").click(),
    "?": () => $("help").showModal(),
  };
  if (!typing) {
    actions.ArrowLeft = () => set({ image: (state.image + count - 1) % count });
    actions.ArrowRight = () => set({ image: (state.image + 1) % count });
    if (event.target.tagName !== "BUTTON") actions[" "] = play;
  }
  const digit = "1234567890".indexOf(event.key);
  if (digit >= 0 && digit < header.classes.length) actions[event.key] = () => select(last, digit);
  const action = actions[event.key] || actions[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
}

/** The options of a link after #: image, iteration, epsilon, theme, and parent as layer,type,place, all from 0. */
function fromLink() {
  const given = new URLSearchParams(location.hash.slice(1)), changes = {};
  for (const name of ["image", "epsilon"]) if (given.has(name)) changes[name] = Number(given.get(name));
  const [layer, type, place] = (given.get("parent") || "").split(",").map(Number);
  changes.parent = given.has("parent") ? { layer, type, place } : { layer: last, type: best(changes.image || 0), place: 0 };
  changes.iteration = given.has("iteration") ? Number(given.get("iteration")) : layers[changes.parent.layer].iterations || 0;
  state.follow = !given.has("parent");
  return changes;
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    $("about").textContent = "This browser is too old for this page: it cannot decompress gzip.";
    return;
  }
  const wanted = new URLSearchParams(location.hash.slice(1)).get("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(wanted || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  await unpack();
  build();
  layOut();
  set(fromLink());
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => {
    layOut();
    draw();
    settle();
  });
  document.body.dataset.ready = "true";
}

start();
