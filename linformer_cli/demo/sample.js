// The view "Sample": images that are drawn at the same time.

import { find } from "./load.js";
import { addCanvases, paintImage, saveImages } from "./paint.js";

const COUNT = 32, COLUMNS = 8;

/** Fills a list with the classes, below a line that stands for no choice. Returns a function that gives the chosen class,
 * or else `usual`, and the guidance of its images. */
export function offerClasses(list, shape, model, others) {
  list.parentElement.hidden = !shape.classes;
  const classes = Array.from({ length: shape.classes }, (_, n) => new Option(model.look.class_names[n] ?? n, n));
  list.append(...(others ? [new Option(others, "")] : []), ...classes);
  return (usual = null) => {
    const label = list.value === "" ? usual : Number(list.value);
    return { label, guidance: label !== null && model.optional_class ? model.guidance : 1 };
  };
}

export function setUpSample(engine, shape, model) {
  const [grid, seed, temperature] = [find("grid"), find("seed"), find("temperature")];
  const canvases = addCanvases(grid, shape, COUNT, "Sample");
  let shown = [];
  const chooseClass = offerClasses(find("class"), shape, model, model.optional_class ? "any" : "all");

  function draw() {
    if ([seed, temperature].some((input) => !input.reportValidity())) return;
    find("save").disabled = true;
    const options = [`-n ${COUNT} --seed ${seed.valueAsNumber}`, "--precision int8"];
    const { label } = chooseClass();
    const name = model.look.class_names[label] ?? label;
    if (label !== null) options.push(`--class ${/^[\w-]+$/.test(name) ? name : `'${name}'`}`);
    if (Number(temperature.value) !== 1) options.push(`--temperature ${temperature.value}`);
    const job = { job: "sample", seed: seed.valueAsNumber, count: COUNT, temperature: Number(temperature.value), ...chooseClass() };
    engine.run(job, ({ images, done, rate }) => {
      images.forEach((image, n) => paintImage(canvases[n], shape, image));
      shown = images;
      const same = done ? ` · the same images as lintx sample ${model.name} ${options.join(" ")}` : "";
      find("sample-speed").textContent = `${rate.toFixed(1)} images/s${same}`;
      find("save").disabled = !done;
      grid.dataset.done = done ? seed.valueAsNumber : "";
    });
  }
  find("sample-go").onclick = () => {
    seed.value = (seed.valueAsNumber || 0) + 1;
    draw();
  };
  seed.onchange = temperature.onchange = find("class").onchange = draw;

  find("save").onclick = () => {
    const name = `${model.name.split("/").pop()}-seed-${seed.valueAsNumber}-temperature-${temperature.value}.png`;
    saveImages(shape, shown, COLUMNS, name);
  };
  return { show: () => find("save").disabled && draw() }; // the last images may be half drawn
}
