// The view "Race": the model against a softmax model of the same size, for the same time each.

import { complain, find, loadFiles } from "./load.js";
import { formatBytes, labelAxis, paintGrid, paintImage, sheet, themeColour } from "./paint.js";

const KEPT = 8; // finished images that are shown

function addLane(title, text, colour) {
  const lane = document.createElement("div");
  lane.className = "lane";
  lane.style.setProperty("--colour", `var(${colour})`);
  lane.innerHTML = `<h2></h2><p class="note"></p><div class="now"><canvas class="pixels" role="img"></canvas><dl>
    <dt>images</dt><dd>0</dd><dt>ms per value</dt><dd>–</dd><dt>state of one image</dt><dd>–</dd></dl></div>
    <div class="bar"><i></i></div><canvas class="pixels done" role="img" aria-label="Finished images"></canvas>`;
  lane.querySelector("h2").textContent = title;
  lane.querySelector(".note").textContent = text;
  find("lanes").append(lane);
  const [image, done] = lane.querySelectorAll("canvas");
  const [images, milliseconds, bytes] = lane.querySelectorAll("dd");
  image.setAttribute("aria-label", `The image that ${title} is drawing`);
  return { title, image, done, images, milliseconds, bytes, bar: lane.querySelector("i"), colour, finished: [], times: [] };
}

const capitals = (name) => name[0].toUpperCase() + name.slice(1);

export function setUpRace(engine, shape, model) {
  const lanes = [
    addLane(model.attention, "trained weights", "--accent"),
    addLane(model.rival, "random weights, so it draws noise", "--rival"),
  ];
  find("race-lead").textContent = `${capitals(model.attention)} attention against ${model.rival} with a cache: models of the same size, for the same time each. Random weights do not change the speed.`;
  const empty = new Uint8Array(shape.height * shape.width * shape.bands);
  let open = false, seed = 0, largest = 1;
  let loading = null; // the program of the second model, which only this view needs

  function reset() {
    for (const lane of lanes) {
      [lane.finished, lane.times] = [[], []];
      paintImage(lane.image, shape, empty);
      paintGrid(lane.done, shape, Array(KEPT).fill(empty), KEPT);
    }
    plot();
  }

  function receive({ lane: number, known, each, images, pixels, state }) {
    const lane = lanes[number];
    // The cache of softmax attention is full at the last position.
    const bytes = number ? (state * known) / shape.values : state;
    largest = Math.max(largest, state);
    lane.images.textContent = images.toFixed(1);
    lane.milliseconds.textContent = each.toFixed(3);
    lane.bytes.textContent = formatBytes(bytes);
    lane.bar.style.width = `${(100 * bytes) / largest}%`;
    paintImage(lane.image, shape, pixels);
    const row = Math.floor((known - 1) / (shape.width * shape.channels));
    (lane.times[row] ??= []).push(each);
    if (known === shape.values) {
      lane.finished = [...lane.finished, pixels].slice(-KEPT);
      paintGrid(lane.done, shape, [...lane.finished, ...Array(KEPT).fill(empty)].slice(0, KEPT), KEPT);
    }
    plot();
  }

  // The median of each row's times.
  const median = (numbers) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1];

  function plot() {
    const { context, width, height } = sheet(find("race-plot"));
    const curves = lanes.map(({ times }) => times.map(median));
    const most = Math.max(0.1, ...curves.flat().filter(Boolean)) * 1.15;
    const [left, base] = [46, height - 22];
    context.fillStyle = themeColour("--quiet");
    context.strokeStyle = themeColour("--edge");
    for (const share of [0, 0.5, 1]) {
      const y = base - share * (base - 14);
      context.fillText((share * most).toFixed(2), 0, y + 4);
      context.strokeRect(left, y, width - left, 0);
    }
    labelAxis(context, left, width, height - 4, shape.values);
    let legend = left;
    curves.forEach((curve, number) => {
      context.strokeStyle = context.fillStyle = themeColour(lanes[number].colour);
      context.lineWidth = 3;
      context.lineJoin = "round";
      context.beginPath();
      curve.forEach((each, row) => {
        context.lineTo(left + ((row + 0.5) / shape.height) * (width - left), base - (each / most) * (base - 14));
      });
      context.stroke();
      const label = `— ${lanes[number].title}`;
      context.fillText(label, legend, 10);
      legend += context.measureText(label).width + 20;
    });
  }

  async function start() {
    loading ??= loadFiles(["rival.lintx"], model);
    try {
      const [rival] = await loading;
      if (!open) return;
      reset();
      engine.run({ job: "race", seed: seed++, rival }, receive);
      find("race-stop").disabled = false;
    } catch (error) {
      loading = null;
      complain(error.message);
    }
  }
  function stop() {
    engine.stop();
    find("race-stop").disabled = true;
  }
  find("race-go").onclick = start;
  find("race-stop").onclick = stop;
  reset();
  return {
    show() {
      open = true;
      start();
    },
    hide() {
      open = false;
      stop();
    },
  };
}
