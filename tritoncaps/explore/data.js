"use strict";
// The data of the page, unpacked once, and values computed from them. collect.py lists the arrays and their axes.

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

/** A slice of an array: fixed values of its first indices. */
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

/** The assignments of a parent's edges: the initial ones (iteration 0), or those after an iteration. */
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

/** The receptive field of a capsule in pixels: [top, left, bottom, right]. */
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
