"use strict";
// The page: data are unpacked once; `state` says what is chosen; `draw` shows it. collect.py names the arrays and axes.

const header = JSON.parse(document.getElementById("header").textContent);
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------- data

let buffer; // all arrays, one after the other
const decoded = new Map();
let halves; // the number of every float16

async function unpack() {
  const bytes = Uint8Array.from(atob($("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  buffer = await new Response(stream).arrayBuffer();
  halves = Float32Array.from({ length: 65536 }, (_, bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
  });
}

/** The numbers of an array, decoded at the first call. The kinds are those of packing.py. */
function array(name) {
  if (!decoded.has(name)) {
    const { begin, kind, shape } = header.arrays[name];
    const length = shape.reduce((a, b) => a * b, 1);
    decoded.set(name, decode(kind, begin, length, shape[0]));
  }
  return decoded.get(name);
}

function decode(kind, begin, length, rows) {
  if (kind === "float16") return Float32Array.from(new Uint16Array(buffer, begin, length), (bits) => halves[bits]);
  if (kind === "int16") return Float32Array.from(new Int16Array(buffer, begin, length));
  if (kind === "rows8") {
    const scale = new Float32Array(buffer, begin, rows), inRow = length / rows;
    return Float32Array.from(new Int8Array(buffer, begin + 4 * rows, length), (q, i) => q * scale[Math.floor(i / inRow)]);
  }
  const quanta = new Uint8Array(buffer, begin, length);
  return Float32Array.from(quanta, kind === "root8" ? (q) => (q / 255) ** 2 : (q) => q / 255);
}

const has = (name) => name in header.arrays;
const shapeOf = (name) => header.arrays[name].shape;

/** The part of an array at the first indices. */
function part(name, ...indices) {
  const shape = shapeOf(name);
  let size = shape.reduce((a, b) => a * b, 1), begin = 0;
  indices.forEach((index, axis) => {
    size /= shape[axis];
    begin += index * size;
  });
  return array(name).subarray(begin, begin + size);
}

// ---------------------------------------------------------------- layers

const layers = header.layers.map((layer) => {
  const [height, width] = layer.size.length ? layer.size : [1, 1];
  return { ...layer, height, width, places: height * width, entries: layer.pose.reduce((a, b) => a * b, 1) };
});
const last = layers.length - 1;
const isVector = layers[0].pose.length === 1;
const titles = { primary: "Primary capsules", conv_caps1: "ConvCaps 1", conv_caps2: "ConvCaps 2", class_caps: "Classes" };
const title = (layer) => titles[layer.name] || layer.name;

/** The edges of a parent: slot, child type, and the child's place in the layer below, type * places + place. */
function edgesOf({ layer, place }) {
  const { name } = layers[layer], below = layers[layer - 1];
  const [slots, types] = shapeOf(`${name}.start`).slice(1, 3);
  const children = array(`${name}.children`), locations = (below.types * below.places) / types;
  const edges = [];
  for (let s = 0; s < slots; s++) {
    const location = children[place * slots + s];
    if (location < 0) continue;
    for (let b = 0; b < types; b++) edges.push({ s, b, child: b * locations + location });
  }
  return edges;
}

/** The assignments of a parent's edges: the first ones (iteration 0), or those that follow from an iteration. */
function assignmentsOf(parent, edges, iteration) {
  const { name, types } = layers[parent.layer];
  const [, slots, inTypes] = shapeOf(`${name}.start`);
  const numbers = iteration ? part(`${name}.assignments`, iteration - 1, state.image) : array(`${name}.start`);
  return Float32Array.from(edges, ({ s, b }) => numbers[((parent.place * slots + s) * inTypes + b) * types + parent.type]);
}

/** The votes of a parent's edges, [edge][entry]: pose times matrix, and the slot's coordinates. */
function votesOf(parent, edges) {
  const { name, types, entries } = layers[parent.layer], below = layers[parent.layer - 1];
  const poses = part(`${below.name}.poses`, state.image), weight = array(`${name}.weight`);
  const weightOf = array(`${name}.weight_of`), offset = array(`${name}.offset`);
  const inTypes = shapeOf(`${name}.start`)[2], size = isVector ? below.entries * entries : 16;
  return edges.map(({ s, b, child }) => {
    const matrix = ((weightOf[s] * inTypes + b) * types + parent.type) * size, pose = child * below.entries;
    const vote = new Float32Array(entries);
    if (isVector) {
      for (let d = 0; d < below.entries; d++)
        for (let e = 0; e < entries; e++) vote[e] += poses[pose + d] * weight[matrix + d * entries + e];
    } else {
      for (let i = 0; i < 4; i++) {
        for (let j = 0; j < 4; j++)
          for (let k = 0; k < 4; k++) vote[4 * i + j] += poses[pose + 4 * i + k] * weight[matrix + 4 * k + j];
        vote[4 * i + 3] += offset[4 * s + i];
      }
    }
    return vote;
  });
}

/** Mean and deviation of a parent after an iteration; null before the first. */
function gaussianOf(parent, iteration) {
  if (!iteration) return null;
  const { name, entries, places } = layers[parent.layer];
  const begin = (parent.type * places + parent.place) * entries;
  const cut = (what) => part(`${name}.${what}`, iteration - 1, state.image).subarray(begin, begin + entries);
  return { mean: cut("mean"), deviation: has(`${name}.deviation`) ? cut("deviation") : null };
}

/** A capsule's pose as the layer returns it. */
function poseOf({ layer, type, place }) {
  const { name, entries, places } = layers[layer], begin = (type * places + place) * entries;
  return part(`${name}.poses`, state.image).subarray(begin, begin + entries);
}

/** The pixels that a capsule sees: [top, left, bottom, right]. */
function fieldOf(layer, place) {
  const { size, step } = header.field, { width, name } = layers[layer];
  if (!layer) {
    const top = Math.floor(place / width) * step, left = (place % width) * step;
    return [top, left, top + size, left + size];
  }
  const [, slots, types] = shapeOf(`${name}.start`), below = layers[layer - 1];
  if (types === below.types * below.places) return [0, 0, ...header.size];
  const boxes = [];
  for (const location of array(`${name}.children`).subarray(place * slots, (place + 1) * slots))
    if (location >= 0) boxes.push(fieldOf(layer - 1, location));
  const of = (pick, axis) => pick(...boxes.map((box) => box[axis]));
  return [of(Math.min, 0), of(Math.min, 1), of(Math.max, 2), of(Math.max, 3)];
}

// ---------------------------------------------------------------- state

const state = { image: 0, iteration: 0, epsilon: 0, parent: null, hover: null, x: 3, y: isVector ? 1 : 7, moved: [] };
if (isVector) state.x = 0;
let chosen = null; // what follows from the parent and the image: edges, votes, assignments of every iteration

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

// ---------------------------------------------------------------- drawing: helpers

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (x, digits = 2) => (Object.is(x, NaN) || x === undefined ? "–" : x.toFixed(digits).replace("-", "−"));

function context(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(ratio, ratio);
  return brush;
}

const DARK = [30, 36, 46], BRIGHT = [238, 244, 252], LIGHT = [255, 150, 56];
const mix = (from, to, t) => `rgb(${from.map((a, i) => Math.round(a + (to[i] - a) * Math.min(Math.max(t, 0), 1))).join(",")})`;

/** A picture of pixels of 0 to 1, one channel or three, in its own size. */
function bitmap(pixels, height, width, channels) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height), area = height * width;
  for (let i = 0; i < area; i++) {
    for (let k = 0; k < 3; k++) image.data[4 * i + k] = 255 * pixels[channels === 3 ? k * area + i : i];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function arrow(brush, x, y, dx, dy, thickness) {
  const length = Math.hypot(dx, dy);
  if (length < 0.8) return;
  brush.lineWidth = thickness;
  brush.beginPath();
  brush.moveTo(x, y);
  brush.lineTo(x + dx, y + dy);
  if (length > 4) {
    const head = Math.min(length * 0.4, 2.2 + thickness * 1.6), ux = dx / length, uy = dy / length;
    for (const side of [0.5, -0.5]) {
      brush.moveTo(x + dx, y + dy);
      brush.lineTo(x + dx - head * (ux + side * uy), y + dy - head * (uy - side * ux));
    }
  }
  brush.stroke();
}

/** A pose as a frame: where the axes of the part point, its first two columns; for vectors, the first two numbers. */
function frame(brush, pose, x, y, radius, scale) {
  const axes = isVector ? [[pose[0], pose[1]]] : [[pose[0], pose[4]], [pose[1], pose[5]]];
  axes.forEach(([dx, dy], i) => {
    const length = Math.hypot(dx, dy) || 1, drawn = radius * Math.min(length / scale, 1);
    arrow(brush, x, y, (dx / length) * drawn, (dy / length) * drawn, Math.max(0.9, radius * (i ? 0.09 : 0.17)));
  });
}

/** A length that nine of ten axes of a layer's poses stay below. */
function poseScale(layer) {
  const poses = part(`${layer.name}.poses`, state.image), lengths = [];
  for (let i = 0; i < poses.length; i += layer.entries)
    lengths.push(isVector ? Math.hypot(poses[i], poses[i + 1]) : Math.hypot(poses[i], poses[i + 4]));
  lengths.sort((a, b) => a - b);
  return lengths[Math.floor(0.9 * (lengths.length - 1))] || 1;
}

// ---------------------------------------------------------------- drawing: the network

const GAP = 6, LARGEST_CELL = 30;

/** Tiles in about as many columns as rows, without a hole where that is possible; a layer alone has more columns. */
function arrange(layer, alone) {
  const root = Math.floor(Math.sqrt(layer.types));
  const divisor = Array.from({ length: root }, (_, i) => root - i).find((n) => layer.types % n === 0);
  const columns = layer.types > 8 && divisor * 3 < root ? root : divisor;
  layer.columns = alone ? Math.ceil(layer.types / columns) : columns;
  layer.rows = Math.ceil(layer.types / layer.columns);
}

/** Cells as large as the room allows: all layers are about as high, and together not too wide. */
function layOut() {
  const layersShown = layers.slice(0, last), style = getComputedStyle($("network"));
  const inner = $("network").clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const others = document.querySelector(".input").offsetWidth + document.querySelector(".classes").offsetWidth;
  const room = Math.max(inner - others - parseFloat(style.columnGap) * (layersShown.length + 1), 300);
  const high = Math.min(Math.max(0.52 * window.innerHeight, 420), 620);
  const fit = (layer) => Math.min((high - GAP * (layer.rows + 1)) / (layer.rows * layer.height), LARGEST_CELL);
  const wide = (layer, cell) => layer.columns * (layer.width * cell + GAP) + GAP;
  layersShown.forEach((layer) => arrange(layer, layersShown.length === 1));
  // large cells shrink more than small ones, until all layers fit
  let size = 10;
  const cellOf = (layer) => Math.max(3, Math.floor(2 * Math.min(fit(layer), size * Math.sqrt(fit(layer)))) / 2);
  while (size > 0.5 && layersShown.reduce((sum, layer) => sum + wide(layer, cellOf(layer)), 0) > room) size -= 0.05;
  for (const layer of layersShown) layer.cell = cellOf(layer);
}

/** The upper left corner of a capsule's cell. */
function corner(layer, flat) {
  const type = Math.floor(flat / layer.places), place = flat % layer.places;
  const x = (type % layer.columns) * (layer.width * layer.cell + GAP) + (place % layer.width) * layer.cell;
  const y = Math.floor(type / layer.columns) * (layer.height * layer.cell + GAP) + Math.floor(place / layer.width) * layer.cell;
  return [x + GAP, y + GAP];
}

/** What light a layer's cells have from the chosen parent: numbers of 0 to 1, or null; and what that is. */
function lightOf(index) {
  const { parent } = state;
  if (!parent || state.epsilon) return [null, "brightness: activation"];
  const layer = layers[index], who = nameOf(parent);
  if (chosen && index === parent.layer - 1) {
    const light = new Float32Array(layer.types * layer.places).fill(-1), step = chosen.steps[state.iteration];
    chosen.edges.forEach(({ child }, i) => (light[child] = Math.sqrt(step[i] / chosen.largest)));
    return [light, `light: assignment to ${who}`];
  }
  if (parent.layer === last && index < last - 1)
    return [part(`${layer.name}.held`, state.image, parent.type).map(Math.sqrt), `light: what it gives to ${who}`];
  return [null, "brightness: activation"];
}

function nameOf({ layer, type, place }) {
  if (layer === last) return header.classes[type];
  const { width } = layers[layer];
  return `type ${type + 1}, row ${Math.floor(place / width) + 1}, column ${(place % width) + 1}`;
}

function drawLayer(index) {
  const layer = layers[index], canvas = $(`layer-${layer.name}`);
  const width = layer.columns * (layer.width * layer.cell + GAP) + GAP;
  const height = layer.rows * (layer.height * layer.cell + GAP) + GAP;
  const brush = context(canvas, width, height);
  const activations = part(`${layer.name}.activations`, state.epsilon, state.image);
  const poses = part(`${layer.name}.poses`, state.image), scale = poseScale(layer);
  const [light, caption] = lightOf(index), side = layer.cell;
  const note = $(`note-${layer.name}`);
  note.textContent = caption;
  note.classList.toggle("light", light !== null);
  for (let flat = 0; flat < layer.types * layer.places; flat++) {
    const [x, y] = corner(layer, flat), a = activations[flat];
    const lit = light ? light[flat] : -1;
    brush.fillStyle = lit >= 0 ? mix(DARK, LIGHT, lit) : mix(DARK, BRIGHT, light ? 0.22 * a : a);
    brush.fillRect(x, y, side - 0.6, side - 0.6);
    if (side < 9 || (light && lit < 0.12)) continue;
    const value = lit >= 0 ? lit : a;
    if (value < 0.15 || state.epsilon) continue;
    brush.strokeStyle = value > 0.45 ? "rgba(10,16,26,0.85)" : `rgba(214,226,242,${0.25 + value})`;
    frame(brush, poses.subarray(flat * layer.entries, (flat + 1) * layer.entries), x + side / 2 - 0.3, y + side / 2 - 0.3, side * 0.44, scale);
  }
  const { parent, hover } = state;
  if (parent && parent.layer === index) ring(brush, layer, parent.type * layer.places + parent.place, "#ff7a1a", 2.5);
  if (hover && hover.layer === index) ring(brush, layer, hover.flat, "#4cc3ff", 2);
}

function ring(brush, layer, flat, colour, thickness) {
  const [x, y] = corner(layer, flat);
  brush.strokeStyle = colour;
  brush.lineWidth = thickness;
  brush.strokeRect(x - 1, y - 1, layer.cell + 1.4, layer.cell + 1.4);
}

function drawPicture() {
  const [height, width] = header.size, canvas = $("picture");
  const side = canvas.parentElement.clientWidth, brush = context(canvas, side, (side * height) / width), scale = side / width;
  const pixels = part("pictures", state.epsilon, state.image);
  brush.imageSmoothingEnabled = false;
  brush.drawImage(bitmap(pixels, height, width, header.channels), 0, 0, side, scale * height);
  const { parent } = state;
  let note = header.channels === 2 ? `${labelsOf(state.image)}, left eye` : labelsOf(state.image);
  if (parent && parent.layer === last && !state.epsilon) {
    drawHeat(brush, part("pixels", state.image, parent.type), height, width, side);
    note += `; light: supports ${header.classes[parent.type]}`;
  } else if (parent && !state.epsilon) {
    const [top, left, bottom, right] = fieldOf(parent.layer, parent.place);
    brush.strokeStyle = "#ff7a1a";
    brush.lineWidth = 2.5;
    brush.strokeRect(left * scale + 1, top * scale + 1, (right - left) * scale - 2, (bottom - top) * scale - 2);
    note += "; frame: what the capsule sees";
  }
  $("image-note").textContent = note;
}

/** Light where the support of a class comes from; the rest of the picture lies in shadow. */
function drawHeat(brush, values, height, width, side) {
  const layer = (colour) => {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const image = new ImageData(width, height);
    values.forEach((value, i) => image.data.set(colour(value), 4 * i));
    canvas.getContext("2d").putImageData(image, 0, 0);
    brush.drawImage(canvas, 0, 0, side, (side * height) / width);
  };
  brush.imageSmoothingEnabled = true;
  layer((value) => [12, 15, 20, 130 * (1 - value)]);
  layer((value) => [255, 132, 20, 165 * value]);
}

function drawClasses() {
  const { parent, epsilon, image, iteration } = state;
  const final = scores(image, epsilon);
  const during = parent && parent.layer === last && !epsilon && iteration < iterations();
  const values = !during ? final : iteration ? Array.from(part(`${layers[last].name}.active`, iteration - 1, image)) : final.map(() => NaN);
  const top = during && !iteration ? -1 : values.indexOf(Math.max(...values));
  const poses = part(`${layers[last].name}.poses`, image), scale = poseScale(layers[last]);
  header.classes.forEach((name, k) => {
    const button = $(`class-${k}`);
    button.setAttribute("aria-pressed", String(Boolean(parent && parent.layer === last && parent.type === k)));
    button.classList.toggle("best", k === top);
    button.querySelector(".name").classList.toggle("true", header.labels[image].includes(k));
    button.querySelector(".value").textContent = number(values[k]);
    button.querySelector(".bar i").style.width = `${100 * Math.min(Math.max(values[k] || 0, 0), 1)}%`;
    const canvas = button.querySelector("canvas"), side = canvas.clientWidth || 30, brush = context(canvas, side, side);
    brush.fillStyle = mix(DARK, BRIGHT, values[k] || 0);
    brush.fillRect(0, 0, side, side);
    brush.strokeStyle = (values[k] || 0) > 0.45 ? "rgba(10,16,26,0.9)" : "rgba(214,226,242,0.8)";
    const { entries } = layers[last];
    frame(brush, poses.subarray(k * entries, (k + 1) * entries), side / 2, side / 2, side * 0.42, scale);
  });
}

function drawAttack() {
  const canvas = $("attack-chart"), width = canvas.parentElement.clientWidth, height = Math.round(width * 0.42);
  const brush = context(canvas, width, height), { epsilons } = header, end = epsilons[epsilons.length - 1] || 1;
  const left = 4, right = width - 4, top = 6, bottom = height - 6;
  const x = (epsilon) => left + ((right - left) * epsilon) / end, y = (a) => bottom - (bottom - top) * a;
  brush.strokeStyle = css("--line");
  brush.lineWidth = 1;
  for (const a of [0, 0.5, 1]) {
    brush.beginPath();
    brush.moveTo(left, y(a));
    brush.lineTo(right, y(a));
    brush.stroke();
  }
  header.classes.forEach((_, k) => {
    const isTrue = header.labels[state.image].includes(k);
    brush.strokeStyle = css(isTrue ? "--accent" : "--soft");
    brush.globalAlpha = isTrue ? 1 : 0.55;
    brush.lineWidth = isTrue ? 2.6 : 1.3;
    brush.beginPath();
    epsilons.forEach((epsilon, e) => brush.lineTo(x(epsilon), y(part("scores", e, state.image)[k])));
    brush.stroke();
  });
  brush.globalAlpha = 1;
  brush.strokeStyle = css("--ink");
  brush.setLineDash([4, 3]);
  brush.beginPath();
  brush.moveTo(x(epsilons[state.epsilon]), top);
  brush.lineTo(x(epsilons[state.epsilon]), bottom);
  brush.stroke();
  brush.setLineDash([]);
  $("epsilon").value = state.epsilon;
  $("epsilon-value").textContent = epsilons[state.epsilon].toFixed(2);
  const taken = header.classes[best(state.image, state.epsilon)];
  $("attack-note").textContent = state.epsilon
    ? `Every pixel moved by epsilon: taken for ${taken}. Routing below is that of the unchanged image.`
    : "Activations over epsilon; the true class is thick.";
}

// ---------------------------------------------------------------- drawing: routing

/** What the scatter shows now, between two iterations while it moves. */
let shown = { weights: new Float32Array(0), mean: null, deviation: null };
let running = 0;

const weightsAt = (iteration) => chosen.steps[iteration].map((r, i) => r * chosen.activations[i]);

function settle() {
  cancelAnimationFrame(running);
  if (chosen) {
    const gaussian = gaussianOf(state.parent, state.iteration);
    shown = { weights: weightsAt(state.iteration), ...(gaussian || { mean: null, deviation: null }) };
  }
  drawScatter();
}

/** From the numbers of an iteration to those of the present one, in a third of a second. */
function animate(from) {
  cancelAnimationFrame(running);
  if (!chosen || matchMedia("(prefers-reduced-motion: reduce)").matches) return settle();
  const begin = performance.now(), before = weightsAt(from), after = weightsAt(state.iteration);
  const old = gaussianOf(state.parent, from), now = gaussianOf(state.parent, state.iteration);
  const between = (a, b, t) => (a && b ? b.map((x, i) => a[i] + (x - a[i]) * t) : b);
  const step = (time) => {
    const t = Math.min((time - begin) / 350, 1), eased = t * t * (3 - 2 * t);
    shown = {
      weights: between(before, after, eased),
      mean: now && between(old && old.mean, now.mean, eased),
      deviation: now && between(old && old.deviation, now.deviation, eased),
    };
    drawScatter();
    if (t < 1) running = requestAnimationFrame(step);
  };
  running = requestAnimationFrame(step);
}

let scatterPoints = []; // on the canvas, for the mouse

function drawScatter() {
  const canvas = $("scatter"), width = canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft);
  const height = Math.round(width * 0.75), brush = context(canvas, width, height);
  scatterPoints = [];
  $("scatter-note").textContent = chosen
    ? isVector
      ? "A dot is a child's vote, as large as its assignment times its activation. The arrow is the parent."
      : "A dot is a child's vote, as large as its assignment times its activation. Ellipses: one and two deviations of the parent's Gaussian; the line is the way of its mean."
    : "Choose a capsule or a class to see the votes for it.";
  if (!chosen) return;
  const { x: ex, y: ey } = state, [x, y] = scales(ex, ey, width, height);
  drawAxes(brush, x, y, width, height);
  const largest = Math.max(...chosen.steps.map((_, t) => weightsAt(t).reduce((a, b) => Math.max(a, b), 0)), 1e-9);
  const dot = css("--blue"), radius = Math.max(5, Math.min(13, 130 / Math.sqrt(chosen.edges.length)));
  brush.fillStyle = dot;
  chosen.votes.forEach((vote, i) => {
    const part = Math.sqrt(shown.weights[i] / largest), px = x(vote[ex]), py = y(vote[ey]);
    scatterPoints.push([px, py]);
    brush.globalAlpha = 0.16 + 0.6 * part;
    brush.beginPath();
    brush.arc(px, py, 1.2 + radius * part, 0, 7);
    brush.fill();
  });
  brush.globalAlpha = 1;
  drawGaussian(brush, x, y, ex, ey);
  const { hover, parent } = state;
  if (hover && hover.layer === parent.layer - 1 && chosen.edgeOf.has(hover.flat)) {
    const [px, py] = scatterPoints[chosen.edgeOf.get(hover.flat)];
    brush.strokeStyle = "#4cc3ff";
    brush.lineWidth = 2.5;
    brush.beginPath();
    brush.arc(px, py, radius + 3, 0, 7);
    brush.stroke();
  }
}

/** From votes to the canvas, the same for all iterations; the furthest votes are left out. */
function scales(ex, ey, width, height) {
  return [[ex, 0, width], [ey, height, 0]].map(([entry, from, to]) => {
    const values = chosen.votes.map((vote) => vote[entry]).sort((a, b) => a - b), at = (q) => values[Math.floor(q * (values.length - 1))];
    let low = at(0.02), high = at(0.98);
    const most = high - low || 1;
    for (let t = 1; t < chosen.steps.length; t++) {
      const { mean, deviation } = gaussianOf(state.parent, t), reach = deviation ? Math.min(2.1 * deviation[entry], most) : 0;
      low = Math.min(low, mean[entry] - reach);
      high = Math.max(high, mean[entry] + reach);
    }
    if (isVector) [low, high] = [Math.min(low, -0.1), Math.max(high, 0.1)];
    const margin = 0.08 * (high - low) || 1, span = high - low + 2 * margin;
    const scale = (value) => from + ((to - from) * (value - low + margin)) / span;
    return Object.assign(scale, { low: low - margin, high: high + margin });
  });
}

function drawAxes(brush, x, y, width, height) {
  brush.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  brush.lineWidth = 1;
  for (const [scale, isX] of [[x, true], [y, false]]) {
    const raw = (scale.high - scale.low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5, 10].find((n) => n * power >= raw) || 10);
    for (let tick = Math.ceil(scale.low / step) * step; tick < scale.high; tick += step) {
      const at = Math.round(scale(tick)) + 0.5;
      brush.strokeStyle = css("--line");
      brush.beginPath();
      brush.moveTo(isX ? at : 0, isX ? 0 : at);
      brush.lineTo(isX ? at : width, isX ? height : at);
      brush.stroke();
      brush.fillStyle = css("--soft");
      const text = number(Math.abs(tick) < step / 1e6 ? 0 : tick, step < 0.1 ? 2 : step < 1 ? 1 : 0);
      if (isX && at > 24 && at < width - 20) brush.fillText(text, at + 3, height - 5);
      if (!isX && at > 16 && at < height - 20) brush.fillText(text, 4, at - 4);
    }
  }
}

function drawGaussian(brush, x, y, ex, ey) {
  if (!shown.mean) return;
  const cx = x(shown.mean[ex]), cy = y(shown.mean[ey]);
  brush.strokeStyle = brush.fillStyle = css("--accent");
  if (isVector) {
    brush.globalAlpha = 1;
    arrow(brush, x(0), y(0), cx - x(0), cy - y(0), 3);
    return;
  }
  const rx = Math.abs(x(shown.mean[ex] + shown.deviation[ex]) - cx), ry = Math.abs(y(shown.mean[ey] + shown.deviation[ey]) - cy);
  for (const [times, alpha] of [[2, 0.07], [1, 0.13]]) {
    brush.beginPath();
    brush.ellipse(cx, cy, Math.max(times * rx, 1), Math.max(times * ry, 1), 0, 0, 7);
    brush.globalAlpha = alpha;
    brush.fill();
    brush.globalAlpha = 1;
    brush.lineWidth = times === 1 ? 2.5 : 1.3;
    brush.stroke();
  }
  brush.lineWidth = 1.6;
  brush.beginPath();
  for (let t = 1; t < state.iteration; t++) {
    const { mean } = gaussianOf(state.parent, t);
    brush.lineTo(x(mean[ex]), y(mean[ey]));
  }
  brush.lineTo(cx, cy);
  brush.stroke();
  brush.beginPath();
  brush.arc(cx, cy, 4.5, 0, 7);
  brush.fill();
}

function drawSteps() {
  const { parent, iteration } = state, routed = parent && parent.layer;
  $("parent-name").textContent = parent ? `${title(layers[parent.layer])}: ${nameOf(parent)}` : "Choose a capsule";
  $("story").textContent = story();
  const slider = $("iteration");
  slider.max = iterations();
  slider.value = iteration;
  slider.disabled = $("play").disabled = !routed;
  $("iteration-value").textContent = iteration ? `${iteration} of ${iterations()}` : "start";
  $("ticks").replaceChildren(...Array.from({ length: iterations() + 1 }, (_, t) => element("span", t || "start")));
  const facts = routed ? factsOf() : [];
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

function story() {
  const { parent, iteration } = state;
  if (!parent) return "Click a capsule of any layer, or a class: its children light up as routing assigns them to it.";
  if (!parent.layer) return "A convolution makes the primary capsules: they have no votes. The frame in the image shows what this one sees.";
  if (!iteration) return "At the start, every child shares itself evenly among the parents that compete for it.";
  const end = iteration === iterations();
  if (isVector)
    return `The parent is the sum of the votes, squashed. Children whose votes agree with it turn to it. ${end ? "Its length is what the layer returns." : ""}`;
  return `The Gaussian is fitted to the votes (M-step). Then children turn to the parents that explain their votes best (E-step). ${end ? "Mean and activation are what the layer returns." : ""}`;
}

function factsOf() {
  const { parent, iteration } = state, { name, places } = layers[parent.layer];
  const weights = weightsAt(iteration), total = weights.reduce((a, b) => a + b, 0);
  const sorted = Array.from(weights).sort((a, b) => b - a);
  let held = 0, count = 0;
  while (count < sorted.length && held < 0.9 * total) held += sorted[count++];
  const active = iteration ? part(`${name}.active`, iteration - 1, state.image)[parent.type * places + parent.place] : NaN;
  return [
    ["activation", number(active)],
    ["data it holds", number(total)],
    ["nine tenths of it from", `${count} of ${weights.length} children`],
    ["largest assignment", number(chosen.steps[iteration].reduce((a, b) => Math.max(a, b), 0))],
  ];
}

function drawPose() {
  const { parent, iteration } = state;
  const box = $("matrix");
  $("pose-note").textContent = "";
  drawFrame();
  if (!parent) return box.replaceChildren();
  const layer = layers[parent.layer];
  let mean = null, deviation = null;
  if (!parent.layer) mean = poseOf(parent);
  else if (iteration) ({ mean, deviation } = gaussianOf(parent, iteration));
  const cells = Array.from({ length: layer.entries }, (_, h) => {
    const cell = element("span", mean ? number(mean[h]) : "–");
    if (mean) {
      const size = Math.min(Math.abs(mean[h]) / (Math.max(...mean.map(Math.abs)) || 1), 1);
      cell.style.background = `color-mix(in srgb, var(${mean[h] < 0 ? "--blue" : "--accent"}) ${Math.round(42 * size)}%, transparent)`;
    }
    if (deviation) cell.title = `deviation ${number(deviation[h], 3)}`;
    cell.classList.toggle("chosen", Boolean(parent.layer) && (h === state.x || h === state.y));
    return cell;
  });
  box.replaceChildren(...cells);
  $("pose-note").textContent = isVector
    ? "Warm: positive, cold: negative. The votes show the two entries with a border."
    : "Warm: positive, cold: negative. The votes show the two entries with a border. The arrows are the first column (warm) and the second (cold); those of earlier iterations are paler.";
}

/** The arrow frame of the chosen capsule, large, with those of the iterations before in a lighter tone. */
function drawFrame() {
  const canvas = $("frame"), { parent, iteration } = state, side = 150, brush = context(canvas, side, side);
  canvas.hidden = !parent;
  if (!parent) return;
  const poses = parent.layer ? Array.from({ length: iteration }, (_, t) => gaussianOf(parent, t + 1).mean) : [poseOf(parent)];
  const axes = (pose) => (isVector ? [[pose[0], pose[1]]] : [[pose[0], pose[4]], [pose[1], pose[5]]]);
  const scale = Math.max(...poses.flatMap(axes).map(([dx, dy]) => Math.hypot(dx, dy)), 1e-6);
  brush.strokeStyle = css("--line");
  brush.beginPath();
  brush.arc(side / 2, side / 2, side * 0.46, 0, 7);
  brush.stroke();
  poses.forEach((pose, t) => {
    brush.globalAlpha = t + 1 === poses.length ? 1 : 0.3;
    axes(pose).forEach(([dx, dy], i) => {
      brush.strokeStyle = css(i ? "--blue" : "--accent");
      arrow(brush, side / 2, side / 2, (dx / scale) * side * 0.46, (dy / scale) * side * 0.46, 3);
    });
  });
}

// ---------------------------------------------------------------- the decoder

const drawsAgain = has("decoder.W0");

function dense(name, input, relu) {
  const [outputs, inputs] = shapeOf(`decoder.W${name}`), weight = array(`decoder.W${name}`), bias = array(`decoder.b${name}`);
  const result = new Float32Array(outputs);
  for (let o = 0; o < outputs; o++) {
    let sum = bias[o];
    for (let i = 0; i < inputs; i++) sum += input[i] * weight[o * inputs + i];
    result[o] = relu ? Math.max(sum, 0) : 1 / (1 + Math.exp(-sum));
  }
  return result;
}

/** The class whose capsule is drawn: the chosen one, or the longest. */
const drawnClass = () => (state.parent && state.parent.layer === last ? state.parent.type : best(state.image));

function reconstruction() {
  const { entries, name } = layers[last], k = drawnClass();
  const input = new Float32Array(entries * header.classes.length);
  const pose = part(`${name}.poses`, state.image).subarray(k * entries, (k + 1) * entries);
  pose.forEach((value, d) => (input[k * entries + d] = value + state.moved[d]));
  return dense("4", dense("2", dense("0", input, true), true), false);
}

function drawReconstruction() {
  if (!drawsAgain) return;
  const [height, width] = header.size, canvas = $("reconstruction"), side = $("picture").clientWidth || 240;
  const brush = context(canvas, side, (side * height) / width);
  brush.imageSmoothingEnabled = false;
  brush.drawImage(bitmap(reconstruction(), height, width, header.channels), 0, 0, side, (side * height) / width);
  state.moved.forEach((value, d) => {
    const input = $(`dimension-${d}`);
    input.value = value;
    input.previousElementSibling.lastElementChild.textContent = number(value);
  });
}

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

/** What a link may say after #: image, iteration, epsilon, theme, and parent as layer,type,place, all from 0. */
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
    $("about").textContent = "This browser is too old for the page: it cannot unpack gzip.";
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
