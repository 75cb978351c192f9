// Runs the checks of a client: a line of JSON for each

import { readFileSync } from "node:fs";

export async function runChecks(client, folder, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${folder}/package.json`, "utf8"));
  for (const [feature, run] of Object.entries(checks)) {
    let error = null;
    try {
      await run();
    } catch (caught) {
      console.error(caught);
      error = `${caught.name}: ${caught.message}`;
    }
    console.log(JSON.stringify({ client, version, feature, error }));
  }
}
