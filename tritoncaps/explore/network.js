// The network: layers as tiles of capsules, the image, the classes, adversarial images.

// ---------------------------------------------------------------- helpers

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (x, digits = 2) => (Number.isNaN(x) ? "–" : x.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−"));

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

/** A picture of pixels in [0, 1], with one or three channels, in its original size. */
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

/** The arrows of a pose, with positive values upwards: its first two columns; for vectors, the first two entries. */
const axesOf = (pose) => (isVector ? [[pose[0], -pose[1]]] : [[pose[0], -pose[4]], [pose[1], -pose[5]]]);

function frame(brush, pose, x, y, radius, scale) {
  axesOf(pose).forEach(([dx, dy], i) => {
    const length = Math.hypot(dx, dy) || 1, drawn = radius * Math.min(length / scale, 1);
    arrow(brush, x, y, (dx / length) * drawn, (dy / length) * drawn, Math.max(0.9, radius * (i ? 0.09 : 0.17)));
  });
}

/** The 90% quantile of the lengths of a layer's pose axes. */
function poseScale(layer) {
  const poses = part(`${layer.name}.poses`, state.image), lengths = [];
  for (let i = 0; i < poses.length; i += layer.entries) lengths.push(Math.hypot(...axesOf(poses.subarray(i, i + layer.entries))[0]));
  lengths.sort((a, b) => a - b);
  return lengths[Math.floor(0.9 * (lengths.length - 1))] || 1;
}

// ---------------------------------------------------------------- the network

const GAP = 6, LARGEST_CELL = 30;

/** About as many columns of tiles as rows, without an empty tile if possible; a single layer gets more columns. */
function arrange(layer, alone) {
  const root = Math.floor(Math.sqrt(layer.types));
  const divisor = Array.from({ length: root }, (_, i) => root - i).find((n) => layer.types % n === 0);
  const columns = layer.types > 8 && divisor * 3 < root ? root : divisor;
  layer.columns = alone ? Math.ceil(layer.types / columns) : columns;
  layer.rows = Math.ceil(layer.types / layer.columns);
}

/** The largest cells that fit: all layers have about the same height, and together fit into the width. */
function layOut() {
  const layersShown = layers.slice(0, last), style = getComputedStyle($("network"));
  const inner = $("network").clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const others = document.querySelector(".input").offsetWidth + document.querySelector(".classes").offsetWidth;
  const room = Math.max(inner - others - parseFloat(style.columnGap) * (layersShown.length + 1), 620);
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

/** The brightness of a layer's cells for the chosen parent: numbers in [0, 1] or null; and its meaning. */
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
    return [part(`${layer.name}.held`, state.image, parent.type).map(Math.sqrt), `light: contribution to ${who}`];
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
    note += "; frame: receptive field";
  }
  $("image-note").textContent = note;
}

/** Brighten the pixels that support a class, and darken the rest of the picture. */
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
    ? `Every pixel changed by epsilon: classified as ${taken}. The routing below is that of the unchanged image.`
    : "Activations over epsilon; the true class is thick.";
}
