// Requests to the server, but for the feeds.

let csrf = "";

async function ask(path, body) {
  const options = { credentials: "same-origin", cache: "no-store", headers: {} };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = { "content-type": "application/json", "x-rallypoint-csrf": csrf };
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The dashboard does not answer: is it still running, and can this machine reach it?");
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const error = new Error(said.error ? sentence(said.error) : `The dashboard answered ${answer.status}.`);
    error.status = answer.status;
    throw error;
  }
  return said;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

export async function me() {
  const found = await ask("/api/me");
  csrf = found.csrf || "";
  return found;
}

export const login = (token) => ask("/api/login", { token });
export const logout = () => ask("/api/logout", {});
export const act = (name, body) => ask(`/api/${name}`, body);
