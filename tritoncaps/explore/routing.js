// Routing: iterations, votes and pose of the chosen capsule, and the reconstruction by the decoder of CapsNet.

// ---------------------------------------------------------------- iterations and votes

/** The numbers in the scatter plot now; during an animation, between those of two iterations. */
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

/** Animate from the numbers of an iteration to those of the current one, in a third of a second. */
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
      ? "Each dot is the vote of a child; its size is the assignment times the activation. The arrow is the parent."
      : "Each dot is the vote of a child; its size is the assignment times the activation. Ellipses: one and two standard deviations of the parent's Gaussian. The line is the path of its mean."
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

/** The scale from votes to the canvas, the same for all iterations; the farthest votes are omitted. */
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
  if (!parent) return "Click a capsule of any layer, or a class. The brightness of its children then shows their assignments.";
  if (!parent.layer) return "A convolution computes the primary capsules: they get no votes. The frame in the image shows the receptive field.";
  if (!iteration) return "At the start, all parents that compete for a child have the same assignment.";
  const end = iteration === iterations();
  if (isVector)
    return `The parent is the squashed sum of the votes. Children whose votes agree with it get larger assignments. ${end ? "The layer returns this parent; its length is the activation." : ""}`;
  return `The M-step fits the Gaussian to the votes. The E-step then gives larger assignments to the parents that explain a child's vote best. ${end ? "The layer returns the mean and the activation." : ""}`;
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
    ["support", number(total)],
    ["90% of it from", `${count} of ${weights.length} children`],
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
    ? "Warm: positive, cold: negative. The plot of the votes shows the two entries with a border."
    : "Warm: positive, cold: negative. The plot of the votes shows the two entries with a border. The arrows are the first column (warm) and the second column (cold); those of earlier iterations are paler.";
}

/** The large arrows of the chosen capsule; those of earlier iterations are paler. */
function drawFrame() {
  const canvas = $("frame"), { parent, iteration } = state, side = 150, brush = context(canvas, side, side);
  canvas.hidden = !parent;
  if (!parent) return;
  const poses = parent.layer ? Array.from({ length: iteration }, (_, t) => gaussianOf(parent, t + 1).mean) : [poseOf(parent)];
  const scale = Math.max(...poses.flatMap(axesOf).map(([dx, dy]) => Math.hypot(dx, dy)), 1e-6);
  brush.strokeStyle = css("--line");
  brush.beginPath();
  brush.arc(side / 2, side / 2, side * 0.46, 0, 7);
  brush.stroke();
  poses.forEach((pose, t) => {
    brush.globalAlpha = t + 1 === poses.length ? 1 : 0.3;
    axesOf(pose).forEach(([dx, dy], i) => {
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

/** The class whose capsule is reconstructed: the chosen one, or the longest. */
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
