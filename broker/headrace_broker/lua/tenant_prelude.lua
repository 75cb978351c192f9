local LONGEST_HEADERS, LONGEST_TENANT, LONGEST_PREFIX, LONGEST_ID = 256 * 1024, 800, 32, 2048
local MOST_CHOICES = 400 -- questions of a decision; the sampling parameter n is at most 64
local HASHED_WHOLE = 1024 * 1024 -- bytes of a message

local function text_of(value, longest)
  return type(value) == 'string' and #value <= longest and not string.find(value, '%c') and value or nil
end

-- Returns the headers from the part of a message that begins with '"headers":'; nil if they cannot be read.
local function headers_in(message)
  local readable, envelope = pcall(cjson.decode, '{' .. message)
  return readable and type(envelope.headers) == 'table' and envelope.headers or nil
end

-- Returns the request id in headers, or nil if it is not valid.
local function request_of(headers)
  local id = headers.id
  return type(id) == 'string' and #id > 0 and #id <= LONGEST_ID and id or nil
end

-- Returns the number of choices in headers, or nil if it is missing or invalid.
local function choices_of(headers)
  local choices = headers.choices
  return type(choices) == 'number' and choices >= 1 and choices <= MOST_CHOICES and choices % 1 == 0 and choices or nil
end

-- Returns the tenant of the message, or '' if it is missing or invalid; the hash of its prompt's beginning, or nil; its
-- request id, or nil; and its number of choices, or nil. Only the part from the headers on is decoded. The pattern
-- cannot match inside a string of the message, where its quotes would be escaped.
local function tenant_of(body)
  local at = string.find(body, '"headers":', 1, true)
  if not at or #body - at > LONGEST_HEADERS then return '' end
  local headers = headers_in(string.sub(body, at))
  if not headers then return '' end
  return text_of(headers.tenant, LONGEST_TENANT) or '', text_of(headers.prefix, LONGEST_PREFIX), request_of(headers),
    choices_of(headers)
end

-- Returns the SHA-1 of a message. A large message would take up to 50 ms, so its middle is left out if its request id
-- is readable. The hash still covers that id. A second message with the same id is a duplicate, whatever its middle is.
local function lease_id_of(body)
  if #body > HASHED_WHOLE and select(3, tenant_of(body)) then
    body = #body .. string.sub(body, 1, LONGEST_HEADERS) .. string.sub(body, -LONGEST_HEADERS)
  end
  return redis.sha1hex(body)
end
