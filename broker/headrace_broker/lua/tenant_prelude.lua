local LONGEST_HEADERS, LONGEST_ID = 256 * 1024, 2048
local HASHED_WHOLE = 1024 * 1024 -- bytes of a message

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

local tenant_of
do -- a script may have 200 local variables outside of blocks
  local LONGEST_TENANT, LONGEST_PREFIX, LONGEST_TIME = 800, 32, 40
  local MOST_CHOICES = 400 -- questions of a decision; the sampling parameter n is at most 64

  local function text_of(value, longest)
    return type(value) == 'string' and #value <= longest and not string.find(value, '%c') and value or nil
  end

  -- Returns the number of choices in headers, or nil if it is missing or invalid.
  local function choices_of(headers)
    local choices = headers.choices
    local is_valid = type(choices) == 'number' and choices >= 1 and choices <= MOST_CHOICES and choices % 1 == 0
    return is_valid and choices or nil
  end

  -- Returns the days from 1970-01-01 to a date of the Gregorian calendar (Howard Hinnant, days_from_civil).
  local function days_to(year, month, day)
    if month < 3 then year, month = year - 1, month + 12 end
    return 365 * year + math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
      + math.floor((153 * month - 457) / 5) + day - 719469
  end

  -- Returns the header `expires` in unix microseconds; nil if it is missing, or is not a time such as
  -- 2026-11-28T07:41:10.5+00:00. Without a time zone it is UTC, as in Celery.
  local function deadline_of(headers)
    local year, month, day, hour, minute, second, fraction, zone = string.match(
      text_of(headers.expires, LONGEST_TIME) or '', '^(%d%d%d%d)-(%d%d)-(%d%d)T(%d%d):(%d%d):(%d%d)(%.?%d*)(.*)$')
    local sign, zone_hours, zone_minutes = string.match(zone or '', '^([+-])(%d%d):?(%d%d)$')
    if not zone or not sign and zone ~= '' and zone ~= 'Z' then return nil end
    local offset = sign and (zone_hours * 60 + zone_minutes) * (sign == '-' and -1 or 1) or 0
    local minutes = (days_to(tonumber(year), tonumber(month), tonumber(day)) * 24 + hour) * 60 + minute - offset
    return (minutes * 60 + second) * 1000000 + math.floor(tonumber('0' .. fraction) * 1000000 + 0.5)
  end

  -- Returns the header `due`, a number of unix seconds, in microseconds; nil if it is missing or invalid. A worker
  -- refuses a message with an invalid one.
  local function due_of(headers)
    local LATEST = 2 ^ 33 -- unix seconds
    local due = headers.due
    return type(due) == 'number' and due >= 0 and due <= LATEST and math.floor(due * 1000000) or nil
  end

  -- Returns the tenant of the message, or '' if it is missing or invalid; the hash of its prompt's beginning, or nil;
  -- its request id, or nil; its number of choices, or nil; its deadline, or nil; the conversation that it continues, or
  -- nil; the one that later requests may continue, or nil; and when it is due, or nil. Only the part from the headers on
  -- is decoded. The pattern cannot match inside a string of the message, where its quotes would be escaped.
  function tenant_of(body)
    local at = string.find(body, '"headers":', 1, true)
    if not at or #body - at > LONGEST_HEADERS then return '' end
    local headers = headers_in(string.sub(body, at))
    if not headers then return '' end
    return text_of(headers.tenant, LONGEST_TENANT) or '', text_of(headers.prefix, LONGEST_PREFIX), request_of(headers),
      choices_of(headers), deadline_of(headers), text_of(headers.continues, LONGEST_PREFIX),
      text_of(headers.conversation, LONGEST_PREFIX), due_of(headers)
  end
end

-- Returns the SHA-1 of a queue and a message. A large message would take up to 50 ms, so its middle is left out if its
-- request id is readable. The hash still covers that id. A second message with the same id is a duplicate, whatever its
-- middle is.
local function lease_id_of(body, queue)
  if #body > HASHED_WHOLE and select(3, tenant_of(body)) then
    body = #body .. string.sub(body, 1, LONGEST_HEADERS) .. string.sub(body, -LONGEST_HEADERS)
  end
  return redis.sha1hex(queue .. body)
end
